//! The maths of one shard: what a rotated layer is written as, once, for every strategy.

use std::ops::Range;

use rotifer_device::{Region, Write};

use crate::build::{Builder, UnitSpec};
use crate::error::Result;
use crate::layer::Context;

/// Rows of a unit that a strategy has at hand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Number of the first of them in the unit: the first token of a part of a table.
    pub first_row: usize,
    /// Which they are among the rows that this rank works on in a pass: their columns of y, and the
    /// place of what is kept for them. The same numbers if that is all rows, as under every
    /// strategy but tensor parallelism.
    pub local: Range<usize>,
}

impl Span {
    /// Rows of a unit of which this rank works on all.
    #[must_use]
    pub const fn of(rows: Range<usize>) -> Span {
        Span { first_row: rows.start, local: rows }
    }
}

/// What of a unit a rank works on in one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Rows in all; of the rank that has most.
    pub rows: usize,
    /// Rows of the largest span.
    pub span_rows_max: usize,
}

/// How a result comes about from the shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Every shard fills columns of its own.
    Columns,
    /// Every shard adds a share to all columns.
    Sum {
        /// Number of columns.
        width: usize,
    },
}

/// One visit of a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visit {
    /// Which rows of the unit.
    pub span: Span,
    /// Whether y (or dx) holds nothing of this pass yet.
    pub first: bool,
    /// What the caller of the pass wants of y (or dx).
    pub write: Write,
}

impl Visit {
    /// Number of rows of the shard.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.span.local.len()
    }

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

    /// How y comes about.
    fn output(&self) -> Share;

    /// How dx comes about.
    fn input_gradient(&self) -> Share;

    /// Asks for what the layer keeps and for its scratch.
    ///
    /// # Errors
    /// If the layer cannot take an input of `width_in` columns, or not under this strategy.
    fn build(&mut self, b: &mut Builder<'_>, width_in: usize, seen: Seen) -> Result<()>;

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

    /// Whether [`backward_weights`](Sharded::backward_weights) adds to dx as well.
    fn backward_weights_writes_dx(&self) -> bool {
        false
    }

    /// What to do once before the shards of a forward pass come by. Returns what they then do with
    /// y.
    fn begin_forward(&self, _cx: &Context<'_>, _y: Region, write: Write) -> Write {
        write
    }

    /// What to do once before the shards of a backward pass come by.
    fn begin_backward(&self, _cx: &Context<'_>, _dy: Region) {}
}
