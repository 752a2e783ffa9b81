//! What a layer is, and what it sees when it runs.

use rotifer_device::{Device, Region, Stream, Write};
use rotifer_ring::{Comm, schedule};

use crate::build::Builder;
use crate::error::Result;
use crate::hash::mix;
use crate::strategy::Driver;

/// A layer of one rank: a function of its slice of the batch, x: `[t, c]` to y: `[t, o]`, and that
/// function's backward. Where its weights are is the business of a strategy.
///
/// Backward order is the algorithm, so there is no graph: a primitive layer writes both passes by
/// hand, and combinators ([`Seq`](crate::layers::Seq), [`Residual`](crate::layers::Residual))
/// derive theirs from their parts.
pub trait Layer {
    /// Columns of y, given those of x.
    fn width_out(&self, width_in: usize) -> usize;

    /// Asks for weights and memory. Called once per pass of the [`Builder`], in a scratch scope of
    /// its own; a layer takes its own scratch before it builds its parts, so that they lie above
    /// it.
    ///
    /// # Errors
    /// If the layer cannot take an input of `width_in` columns.
    fn build(&mut self, b: &mut Builder<'_>, width_in: usize) -> Result<()>;

    /// `y = f(x)` or `y +=`. x: `[t, c]`, y: `[t, o]`, t = `cx.tokens()`.
    ///
    /// # Errors
    /// If a neighbour in the ring fails.
    fn forward(&self, cx: &Context<'_>, x: Region, y: Region, write: Write) -> Result<()>;

    /// `dx = f'(x) dy` or `dx +=`, and every parameter's gradient `+=`. x is what forward was
    /// given. dx is not dy, unless [`runs_in_place`](Layer::runs_in_place).
    ///
    /// # Errors
    /// If a neighbour in the ring fails.
    fn backward(
        &self,
        cx: &Context<'_>,
        x: Region,
        dy: Region,
        dx: Region,
        write: Write,
    ) -> Result<()>;

    /// Whether forward is so cheap that its output is made again in backward instead of being kept.
    fn is_cheap(&self) -> bool {
        false
    }

    /// Whether backward reads x.
    fn backward_reads_input(&self) -> bool {
        true
    }

    /// Whether forward can add to y. If not, the layer cannot end the body of a residual
    /// connection.
    fn can_add(&self) -> bool {
        true
    }

    /// Whether backward takes dy and dx in one region: a residual stream's gradient.
    fn runs_in_place(&self) -> bool {
        false
    }
}

/// Why a layer runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Optimiser step `step`, from 0. Dropout is on.
    Train {
        /// Number of the step.
        step: u64,
    },
    /// Loss or logits only. Dropout is off, and no backward follows.
    Evaluate,
}

/// What a layer sees when it runs: the device, the strategy, and this rank's slice of the batch.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The rank's device.
    pub dev: &'a dyn Device,
    /// What brings shards to this rank.
    pub driver: &'a Driver,
    /// This rank's slice.
    pub batch: &'a Batch,
    /// Why it runs.
    pub phase: Phase,
    /// The run's seed.
    pub seed: u64,
    /// 1 / (target tokens of the whole global batch): what each token's loss gradient is scaled by.
    pub loss_scale: f32,
    /// Where the loss head adds its sum over tokens: `[1]` `F64`.
    pub loss: Region,
}

impl Context<'_> {
    /// The communicator.
    #[must_use]
    pub const fn comm(&self) -> &Comm {
        self.driver.comm()
    }

    /// t: tokens of this rank's slice.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.rows() * self.batch.seq
    }

    /// b: batch rows of this rank's slice.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.batch.slices.rows(self.batch.slice).len()
    }

    /// Random numbers for layer `layer` at this step, and the global index of this rank's first
    /// element, given the elements per token: the same masks for any N and any accumulation.
    #[must_use]
    pub fn stream(&self, layer: u64, step: u64, width: usize) -> (Stream, u64) {
        let first_row = self.batch.slices.rows(self.batch.slice).start;
        let stream = Stream { seed: self.seed, stream: mix(mix(layer) ^ step) };
        (stream, (first_row * self.batch.seq * width) as u64)
    }
}

/// The inputs of one micro-batch, of this rank's slice only.
#[derive(Clone, Debug)]
pub struct Batch {
    /// s: tokens per row.
    pub seq: usize,
    /// Which rows of the global batch are in which slice now.
    pub slices: Slices,
    /// The slice that this rank sees.
    pub slice: usize,
    /// Token ids: `[t]` `I32`.
    pub ids: Region,
    /// Positions within the row: `[t]` `I32`.
    pub positions: Region,
    /// Next-token targets, negative where there is none: `[t]` `I32`.
    pub targets: Region,
    /// Document numbers, if attention must not cross documents: `[t]` `I32`.
    pub documents: Option<Region>,
}

/// How the rows of a global batch are cut: in one slice per rank (or in one that all ranks see),
/// and each slice in micro-batches. Sizes differ by at most one row and may be zero; a rank with no
/// row still turns the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slices {
    /// Rows of the global batch.
    pub rows: usize,
    /// Number of slices.
    pub count: usize,
    /// Number of micro-batches.
    pub accumulation: usize,
    /// Which of them.
    pub micro: usize,
}

impl Slices {
    /// The rows of slice `slice`, by their number in the global batch.
    #[must_use]
    pub const fn rows(&self, slice: usize) -> std::ops::Range<usize> {
        let slice = schedule::part(self.rows, self.count, slice);
        let micro = schedule::part(slice.end - slice.start, self.accumulation, self.micro);
        slice.start + micro.start..slice.start + micro.end
    }

    /// Rows of the largest slice of any micro-batch.
    #[must_use]
    pub const fn rows_max(rows: usize, count: usize, accumulation: usize) -> usize {
        rows.div_ceil(count).div_ceil(accumulation)
    }
}
