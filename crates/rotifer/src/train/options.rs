//! What a run decides beside the model and the data.

use crate::build::BuildOptions;
use crate::error::{Error, Result};
use crate::layer::Slices;
use crate::optim::{LrSchedule, Optimizer};

/// Bound of one travelling shard unless a run says otherwise: large enough for products at full
/// speed, small beside what a rank holds.
pub const DEFAULT_TRAVEL_BYTES_MAX: usize = 4 << 20;

/// Everything a run decides beside the model and the data.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainOptions {
    /// Rows of the global batch.
    pub batch: usize,
    /// Micro-batches that it is worked off in.
    pub accumulation: usize,
    /// Tokens per row.
    pub seq: usize,
    /// Seed of initial weights and dropout.
    pub seed: u64,
    /// Bound of the global gradient norm.
    pub clip_norm: Option<f32>,
    /// The update rule.
    pub optimizer: Optimizer,
    /// The learning rate by step.
    pub schedule: LrSchedule,
    /// Whether hops run beside products (see [`rotifer_ring::Ring`]).
    pub overlap: bool,
    /// Bound of one travelling shard, in bytes.
    pub travel_bytes_max: usize,
    /// Whether attention stays within documents.
    pub documents: bool,
    /// Rows for which the model will make logits; 0 if it will not sample.
    pub logits_rows: usize,
    /// Whether to compare the replicated parameters of all ranks after each step.
    pub verify_replicated: bool,
    /// Whether to train at all; if not, there are neither gradients nor optimiser state.
    pub train: bool,
}

impl TrainOptions {
    /// For a model that is not trained: one row of `seq` tokens, no gradients, no state.
    #[must_use]
    pub const fn for_sampling(seq: usize) -> TrainOptions {
        TrainOptions {
            batch: 1,
            accumulation: 1,
            seq,
            seed: 0,
            clip_norm: None,
            optimizer: Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 },
            schedule: LrSchedule::constant(0.0),
            overlap: true,
            travel_bytes_max: DEFAULT_TRAVEL_BYTES_MAX,
            documents: false,
            logits_rows: 1,
            verify_replicated: false,
            train: false,
        }
    }

    pub(super) fn build_options(&self, world: usize) -> BuildOptions {
        BuildOptions {
            seq: self.seq,
            rows_max: Slices::rows_max(self.batch, world, self.accumulation),
            train: self.train,
            states: self.optimizer.states(),
            logits_rows: self.logits_rows,
            travel_bytes_max: self.travel_bytes_max,
            overlap: self.overlap,
        }
    }

    pub(super) fn check(&self, world: usize) -> Result<()> {
        let what = if self.batch < world && self.train {
            format!(
                "{world} ranks cannot share a batch of {} rows: raise train.batch or lower the \
                 number of ranks",
                self.batch
            )
        } else if self.logits_rows > Slices::rows_max(self.batch, world, self.accumulation.max(1)) {
            format!("logits of {} rows need a batch of as many rows per rank", self.logits_rows)
        } else if self.batch == 0 || self.accumulation == 0 || self.seq == 0 {
            format!(
                "batch ({}), accumulation ({}) and seq ({}) must be at least 1",
                self.batch, self.accumulation, self.seq
            )
        } else {
            return Ok(());
        };
        Err(Error::Shape { what })
    }
}
