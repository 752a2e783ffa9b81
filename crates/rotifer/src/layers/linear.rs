//! Linear layer, cut along its output columns.

use rotifer_device::{Mat, Region, Write};

use crate::build::{Builder, Tensor, UnitSpec};
use crate::error::{Error, Result};
use crate::layer::Context;
use crate::params::{Init, Layout};
use crate::sharded::{Sharded, Visit};
use crate::strategy::Driven;

/// `y = x W^T + b`. x: `[t, c]`, W: `[o, c]`, b: `[o]`, y: `[t, o]`.
///
/// Shard k holds rows k of W and b and fills columns k of y in place, so o need not divide by N.
/// Backward: `dx += dy_k W_k`, `dW_k += dy_k^T x`, `db_k += sum over t of dy_k`.
///
/// Bytes: holds o/N (c + 1) weights; saves nothing (its caller keeps x); o/N (c + 1) travel.
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
}

impl Linear {
    /// A layer from `width_in` to `width_out` columns with weights `name.weight` and `name.bias`,
    /// initially normal with standard deviation 0.02 and zero.
    #[must_use]
    pub fn new(name: &str, width_in: usize, width_out: usize) -> Linear {
        let init = Init::Normal { std: 0.02 };
        Linear { name: name.into(), width_in, width_out, bias: true, layout: Layout::Rows, init }
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

    /// As a layer, driven by the strategy.
    #[must_use]
    pub const fn driven(self) -> Driven<Linear> {
        Driven::new(self)
    }

    /// The shard's rows of W, and of b behind them.
    fn parts(&self, visit: &Visit, w: Region) -> (Mat, Region) {
        let rows = visit.rows.len();
        let weights = rows * self.width_in;
        (Mat::new(w, rows, self.width_in), w.slice(weights..w.len()))
    }
}

impl Sharded for Linear {
    fn spec(&self) -> UnitSpec {
        let mut tensors = vec![Tensor {
            name: format!("{}.weight", self.name),
            width: self.width_in,
            layout: self.layout,
            init: self.init,
            decay: true,
        }];
        if self.bias {
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
            rows: self.width_out,
            tensors,
            shard_rows_max: usize::MAX,
            backward_reads_weights: true,
        }
    }

    fn width_out(&self, _width_in: usize) -> usize {
        self.width_out
    }

    fn build(&mut self, _b: &mut Builder<'_>, width_in: usize, _rows: usize) -> Result<()> {
        expect_width(&self.name, self.width_in, width_in)
    }

    fn forward(&self, cx: &Context<'_>, visit: &Visit, w: Region, x: Region, y: Region) {
        let (w, b) = self.parts(visit, w);
        let x = Mat::new(x, cx.tokens(), self.width_in);
        let y_k = Mat::new(y, cx.tokens(), self.width_out).columns(visit.rows.clone());
        if self.bias {
            cx.dev.bias(b, y_k, visit.write);
            cx.dev.matmul(x, w.t(), y_k, Write::Add);
        } else {
            cx.dev.matmul(x, w.t(), y_k, visit.write);
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
        let dy_k = Mat::new(dy, cx.tokens(), self.width_out).columns(visit.rows.clone());
        let dx = Mat::new(dx, cx.tokens(), self.width_in);
        cx.dev.matmul(dy_k, w, dx, visit.share());
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
        let dy_k = Mat::new(dy, cx.tokens(), self.width_out).columns(visit.rows.clone());
        cx.dev.matmul(dy_k.t(), Mat::new(x, cx.tokens(), self.width_in), dw, Write::Add);
        if self.bias {
            cx.dev.bias_backward(dy_k, db);
        }
    }
}

/// Checks the columns of a layer's input.
pub(super) fn expect_width(layer: &str, expected: usize, got: usize) -> Result<()> {
    if expected == got { Ok(()) } else { Err(Error::Width { layer: layer.into(), expected, got }) }
}
