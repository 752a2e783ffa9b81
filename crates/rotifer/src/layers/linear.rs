//! Linear layer, cut along its output or its input columns.

use rotifer_device::{Dtype, Mat, Region, Write};

use crate::build::{Builder, Tensor, UnitSpec};
use crate::error::{Error, Result};
use crate::layer::Context;
use crate::params::{Init, Layout};
use crate::sharded::{Seen, Sharded, Share, Visit};
use crate::strategy::{Driven, Strategy};

/// `y = x W^T + b`. x: `[t, c]`, W: `[o, c]`, b: `[o]`, y: `[t, o]`.
///
/// Cut along the outputs (the default), shard k holds rows k of W and b and fills columns k of y in
/// place, so o need not divide by N. Backward: `dx += dy_k W_k`, `dW_k += dy_k^T x`,
/// `db_k += sum over t of dy_k`.
///
/// Cut along the inputs, shard k holds columns k of W, reads columns k of x and adds a share of y;
/// b is replicated. Backward: `dx_k = dy W_k`, `dW_k += dy^T x_k`.
///
/// Bytes: holds o/N (c + 1) weights (c/N o, and b, if cut along the inputs); saves nothing (its
/// caller keeps x); as much travels.
///
/// # Errors
/// Under tensor parallelism a layer that is not one of a pair, as in
/// [`SelfAttention`](super::SelfAttention), cannot be built: what is between two of a pair is cut.
///
/// Source: paper section 3.1; semantics of `torch.nn.Linear`.
#[derive(Clone, Debug)]
pub struct Linear {
    name: String,
    width_in: usize,
    width_out: usize,
    bias: bool,
    layout: Layout,
    init: Init,
    cut: Along,
    /// Blocks of output rows, if this is one of a pair.
    pair: Option<Vec<usize>>,
    /// Columns of y (or of x) that this rank works on.
    local: usize,
    /// b, if replicated.
    whole_bias: (Region, Region),
}

/// Which columns a [`Linear`] is cut along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Along {
    /// Those of y.
    Outputs,
    /// Those of x.
    Inputs,
}

impl Linear {
    /// A layer from `width_in` to `width_out` columns with weights `name.weight` and `name.bias`,
    /// initially normal with standard deviation 0.02 and zero.
    #[must_use]
    pub fn new(name: &str, width_in: usize, width_out: usize) -> Linear {
        let none = Region::empty(Dtype::F32);
        Linear {
            name: name.into(),
            width_in,
            width_out,
            bias: true,
            layout: Layout::Rows,
            init: Init::Normal { std: 0.02 },
            cut: Along::Outputs,
            pair: None,
            local: 0,
            whole_bias: (none, none),
        }
    }

    /// Without the bias.
    #[must_use]
    pub fn without_bias(self) -> Linear {
        Linear { bias: false, ..self }
    }

    /// With this initial value of the weights.
    #[must_use]
    pub fn init(self, init: Init) -> Linear {
        Linear { init, ..self }
    }

    /// With this layout of the weights in files.
    #[must_use]
    pub fn layout(self, layout: Layout) -> Linear {
        Linear { layout, ..self }
    }

    /// As the first of a pair that tensor parallelism leaves cut between: along the outputs, in
    /// blocks of so many rows, each cut on its own.
    #[must_use]
    pub(super) fn first_of_pair(self, blocks: Vec<usize>) -> Linear {
        Linear { cut: Along::Outputs, pair: Some(blocks), ..self }
    }

    /// As the second of such a pair: along the inputs.
    #[must_use]
    pub(super) fn second_of_pair(self) -> Linear {
        Linear { cut: Along::Inputs, pair: Some(Vec::new()), ..self }
    }

    /// As a layer, driven by the strategy.
    #[must_use]
    pub const fn driven(self) -> Driven<Linear> {
        Driven::new(self)
    }

    /// The shard's rows of W (or of its transpose, if cut along the inputs), and of b behind them.
    fn parts(&self, visit: &Visit, w: Region) -> (Mat, Region) {
        let (rows, width) = (visit.rows(), self.row_width());
        (Mat::new(w, rows, width), w.slice(rows * width..w.len()))
    }

    const fn row_width(&self) -> usize {
        match self.cut {
            Along::Outputs => self.width_in,
            Along::Inputs => self.width_out,
        }
    }

    /// Whether b is cut with the weights.
    fn cut_bias(&self) -> bool {
        self.bias && self.cut == Along::Outputs
    }

    /// x (or dx) as this rank has it: all columns, unless the layer before is cut as well.
    fn x(&self, cx: &Context<'_>, visit: &Visit, x: Region) -> Mat {
        match self.cut {
            Along::Outputs => Mat::new(x, cx.tokens(), self.width_in),
            Along::Inputs => Mat::new(x, cx.tokens(), self.local).columns(visit.span.local.clone()),
        }
    }

    /// y (or dy), likewise.
    fn y(&self, cx: &Context<'_>, visit: &Visit, y: Region) -> Mat {
        match self.cut {
            Along::Outputs => {
                Mat::new(y, cx.tokens(), self.local).columns(visit.span.local.clone())
            }
            Along::Inputs => Mat::new(y, cx.tokens(), self.width_out),
        }
    }
}

impl Sharded for Linear {
    fn spec(&self) -> UnitSpec {
        let (rows, layout) = match (self.cut, self.layout) {
            (Along::Outputs, layout) => (self.width_out, layout),
            // Rows of the transpose.
            (Along::Inputs, Layout::Rows) => (self.width_in, Layout::Transposed),
            (Along::Inputs, _) => (self.width_in, Layout::Rows),
        };
        let mut tensors = vec![Tensor {
            name: format!("{}.weight", self.name),
            width: self.row_width(),
            layout,
            init: self.init,
            decay: true,
        }];
        if self.cut_bias() {
            tensors.push(Tensor {
                name: format!("{}.bias", self.name),
                width: 1,
                layout: Layout::Vector,
                init: Init::Zeros,
                decay: false,
            });
        }
        UnitSpec {
            name: self.name.clone(),
            rows,
            tensors,
            blocks: self.pair.clone().unwrap_or_default(),
            visit_rows_max: usize::MAX,
            backward_reads_weights: true,
        }
    }

    fn width_out(&self, _width_in: usize) -> usize {
        self.width_out
    }

    fn output(&self) -> Share {
        match self.cut {
            Along::Outputs => Share::Columns,
            Along::Inputs => Share::Sum { width: self.width_out },
        }
    }

    fn input_gradient(&self) -> Share {
        match self.cut {
            Along::Outputs => Share::Sum { width: self.width_in },
            Along::Inputs => Share::Columns,
        }
    }

    fn build(&mut self, b: &mut Builder<'_>, width_in: usize, seen: Seen) -> Result<()> {
        expect_width(&self.name, self.width_in, width_in)?;
        if b.strategy() == Strategy::Tp && b.world() > 1 && self.pair.is_none() {
            return Err(Error::NotPaired { layer: self.name.clone() });
        }
        if self.bias && !self.cut_bias() {
            let name = format!("{}.bias", self.name);
            self.whole_bias = b.replicated(name, self.width_out, Init::Zeros)?;
        }
        self.local = seen.rows;
        Ok(())
    }

    fn begin_forward(&self, cx: &Context<'_>, y: Region, write: Write) -> Write {
        if !self.bias || self.cut_bias() {
            return write;
        }
        cx.dev.bias(self.whole_bias.0, Mat::new(y, cx.tokens(), self.width_out), write);
        Write::Add
    }

    fn begin_backward(&self, cx: &Context<'_>, dy: Region) {
        if self.bias && !self.cut_bias() {
            let dy = Mat::new(dy, cx.tokens(), self.width_out);
            cx.dev.bias_backward(dy, self.whole_bias.1);
        }
    }

    fn forward(&self, cx: &Context<'_>, visit: &Visit, w: Region, x: Region, y: Region) {
        let (w, b) = self.parts(visit, w);
        let (x, y) = (self.x(cx, visit, x), self.y(cx, visit, y));
        match self.cut {
            Along::Inputs => cx.dev.matmul(x, w, y, visit.share()),
            Along::Outputs if self.bias => {
                cx.dev.bias(b, y, visit.write);
                cx.dev.matmul(x, w.t(), y, Write::Add);
            }
            Along::Outputs => cx.dev.matmul(x, w.t(), y, visit.write),
        }
    }

    fn backward_data(
        &self,
        cx: &Context<'_>,
        visit: &Visit,
        w: Region,
        _x: Region,
        dy: Region,
        dx: Region,
    ) {
        let (w, _) = self.parts(visit, w);
        let (dy, dx) = (self.y(cx, visit, dy), self.x(cx, visit, dx));
        match self.cut {
            Along::Outputs => cx.dev.matmul(dy, w, dx, visit.share()),
            Along::Inputs => cx.dev.matmul(dy, w.t(), dx, visit.write),
        }
    }

    fn backward_weights(
        &self,
        cx: &Context<'_>,
        visit: &Visit,
        _w: Region,
        x: Region,
        dy: Region,
        _dx: Region,
        dw: Region,
    ) {
        let (dw, db) = self.parts(visit, dw);
        let (x, dy) = (self.x(cx, visit, x), self.y(cx, visit, dy));
        match self.cut {
            Along::Outputs => cx.dev.matmul(dy.t(), x, dw, Write::Add),
            Along::Inputs => cx.dev.matmul(x.t(), dy, dw, Write::Add),
        }
        if self.cut_bias() {
            cx.dev.bias_backward(dy, db);
        }
    }
}

/// Checks the columns of a layer's input.
pub(super) fn expect_width(layer: &str, expected: usize, got: usize) -> Result<()> {
    if expected == got { Ok(()) } else { Err(Error::Width { layer: layer.into(), expected, got }) }
}
