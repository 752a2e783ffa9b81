//! What a run decides beside the model and the data.

use rotifer_ring::HopMode;

use crate::build::BuildOptions;
use crate::error::{Error, Result};
use crate::layer::Slices;
use crate::optim::{LrSchedule, Optimizer};
use crate::strategy::Strategy;

/// Bound of one travelling shard unless a run says otherwise: large enough for products at full
/// speed, small beside what a rank holds.
pub const DEFAULT_TRAVEL_BYTES_MAX: usize = 4 << 20;

/// Everything a run decides beside the model and the data.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainOptions {
    /// What the ranks hold and exchange.
    pub strategy: Strategy,
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
    /// Whether what moves between ranks does so beside products.
    pub overlap: bool,
    /// Fully sharded data parallelism: whether a unit is given up between forward and backward.
    pub reshard_after_forward: bool,
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
            strategy: Strategy::Rtp,
            batch: 1,
            accumulation: 1,
            seq,
            seed: 0,
            clip_norm: None,
            optimizer: Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 },
            schedule: LrSchedule::constant(0.0),
            overlap: true,
            reshard_after_forward: true,
            travel_bytes_max: DEFAULT_TRAVEL_BYTES_MAX,
            documents: false,
            logits_rows: 1,
            verify_replicated: false,
            train: false,
        }
    }

    /// What `world` ranks exchange, in words. A rotating shard moves by `hop_mode`.
    #[must_use]
    pub const fn form(&self, world: usize, hop_mode: HopMode) -> &'static str {
        if world == 1 {
            return "one rank";
        }
        match (self.strategy, hop_mode, self.overlap) {
            (Strategy::Rtp, HopMode::HandOver, _) => "rtp: shards handed over",
            (Strategy::Rtp, HopMode::Copy, true) => "rtp: shards copied through spares",
            (Strategy::Rtp, HopMode::Copy, false) => "rtp: shards copied in place",
            (Strategy::Ddp, ..) => "ddp: gradients all-reduced",
            (Strategy::Zero1, ..) => "zero1: gradients reduce-scattered, weights all-gathered",
            (Strategy::Fsdp, ..) if self.reshard_after_forward => {
                "fsdp: units gathered in forward and in backward"
            }
            (Strategy::Fsdp, ..) => "fsdp: units gathered in forward and kept",
            (Strategy::Tp, ..) => "tp: activations all-reduced",
        }
    }

    pub(super) fn build_options(&self, world: usize) -> BuildOptions {
        BuildOptions {
            strategy: self.strategy,
            seq: self.seq,
            rows_max: self.rows_max(world),
            train: self.train,
            states: self.optimizer.states(),
            logits_rows: self.logits_rows,
            travel_bytes_max: self.travel_bytes_max,
            overlap: self.overlap,
            reshard_after_forward: self.reshard_after_forward,
        }
    }

    /// Rows of the largest micro-batch that a rank sees.
    fn rows_max(&self, world: usize) -> usize {
        let slices = self.strategy.num_slices(world);
        Slices::rows_max(self.batch, slices, self.accumulation.max(1))
    }

    pub(super) fn check(&self, world: usize) -> Result<()> {
        let slices = self.strategy.num_slices(world);
        let what = if self.batch < slices && self.train {
            format!(
                "{world} ranks cannot share a batch of {} rows: raise train.batch or lower the \
                 number of ranks",
                self.batch
            )
        } else if self.logits_rows > self.rows_max(world) {
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
