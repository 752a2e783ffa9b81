//! The maths of one shard: what a rotated layer is written as, once, for every strategy.

use std::ops::Range;

use rotifer_device::{Region, Write};

use crate::build::{Builder, UnitSpec};
use crate::error::Result;
use crate::layer::Context;

/// Which shard a strategy has at hand, and whether it is the first of its pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visit {
    /// The shard's rows of the unit.
    pub rows: Range<usize>,
    /// Whether y (or dx) holds nothing of this pass yet.
    pub first: bool,
    /// What the caller of the pass wants of y (or dx).
    pub write: Write,
}

impl Visit {
    /// For an output to which every shard adds a share: the first one obeys the caller.
    #[must_use]
    pub fn share(&self) -> Write {
        if self.first { self.write } else { Write::Add }
    }
}

/// One layer's maths on one shard of its weights. Knows shapes and shard bounds, never ranks.
///
/// `w` is the shard: for each tensor of [`UnitSpec::tensors`] in order, the rows of the shard.
/// t = `cx.tokens()`.
pub trait Sharded {
    /// The unit: names, rows and tensors.
    fn spec(&self) -> UnitSpec;

    /// Columns of y, given those of x.
    fn width_out(&self, width_in: usize) -> usize;

    /// Asks for what the layer keeps and for its scratch. `shard_rows_max` bounds every shard.
    ///
    /// # Errors
    /// If the layer cannot take an input of `width_in` columns.
    fn build(&mut self, b: &mut Builder<'_>, width_in: usize, shard_rows_max: usize) -> Result<()>;

    /// Fills this shard's columns of y, or adds its share, by `visit`.
    fn forward(&self, cx: &Context<'_>, visit: &Visit, w: Region, x: Region, y: Region);

    /// `dx +=` this shard's share: everything that needs the weights, while the shard's gradient is
    /// still on its way.
    fn backward_data(
        &self,
        cx: &Context<'_>,
        visit: &Visit,
        w: Region,
        x: Region,
        dy: Region,
        dx: Region,
    );

    /// `dw +=` into the travelling gradient, laid out as the weights. Follows
    /// [`backward_data`](Sharded::backward_data) for the same shard and may use what that left in
    /// scratch.
    #[expect(clippy::too_many_arguments, reason = "the operands of one equation")]
    fn backward_weights(
        &self,
        cx: &Context<'_>,
        visit: &Visit,
        w: Region,
        x: Region,
        dy: Region,
        dx: Region,
        dw: Region,
    );

    /// What to do once before the shards of a forward pass come by.
    fn begin_forward(&self, _cx: &Context<'_>, _y: Region, _write: Write) {}

    /// What to do once before the shards of a backward pass come by.
    fn begin_backward(&self, _cx: &Context<'_>, _dy: Region) {}
}
