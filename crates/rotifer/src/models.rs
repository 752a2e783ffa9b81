//! Models: structure only. What a model holds and how backward runs follows from its layers.

mod decoder;
mod gpt2;
mod hf;

pub use decoder::Decoder;
pub use gpt2::{Gpt2, gpt2};
pub use hf::HfConfig;

use crate::build::Builder;
use crate::error::Result;
use crate::layer::Context;
use rotifer_device::Region;

/// What a trainer trains.
pub trait Model {
    /// Asks for all weights and memory. Called once per pass of the builder.
    ///
    /// # Errors
    /// If the layers' shapes do not fit together.
    fn build(&mut self, b: &mut Builder<'_>) -> Result<()>;

    /// `cx.loss +=` the loss summed over the target tokens of this rank's slice.
    ///
    /// # Errors
    /// If a neighbour in the ring fails.
    fn forward(&self, cx: &Context<'_>) -> Result<()>;

    /// Every parameter's gradient `+=`, of the summed loss times `cx.loss_scale`. Follows
    /// [`forward`](Model::forward) on the same batch.
    ///
    /// # Errors
    /// If a neighbour in the ring fails.
    fn backward(&self, cx: &Context<'_>) -> Result<()>;

    /// The logits that follow one token of each row of this rank's slice, `[rows, classes]`, for
    /// sampling. `positions` says which token, by row.
    ///
    /// # Errors
    /// If a neighbour in the ring fails.
    fn logits(&self, cx: &Context<'_>, positions: &[usize]) -> Result<Region>;

    /// Number of classes.
    fn classes(&self) -> usize;
}
