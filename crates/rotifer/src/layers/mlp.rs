//! The two matrices of an MLP as one unit, cut along the hidden width.

use rotifer_device::{Activation, Dtype, Mat, Region, Write};

use super::linear::expect_width;
use crate::build::{Builder, Tensor, UnitSpec};
use crate::error::Result;
use crate::layer::Context;
use crate::params::{Init, Layout};
use crate::sharded::{Seen, Sharded, Share, Visit};
use crate::strategy::Driven;

/// Which MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlpKind {
    /// `f(x U^T + b_u) D^T + b_d`, as GPT-2. Files hold `c_fc` and `c_proj` as `Conv1D`.
    Plain(Activation),
    /// `(f(x G^T) * x U^T) D^T`, without biases, as Llama. Files hold `gate_proj`, `up_proj` and
    /// `down_proj`.
    Gated(Activation),
}

/// What becomes of the hidden activation between forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hidden {
    /// Kept: t x f elements (2 t x f if gated).
    Saved,
    /// Made again in backward, one shard at a time, from the weights that come by anyway: a third
    /// more products in the MLP, and it never exists for more than one shard.
    Recomputed,
}

/// `y = f(x U^T + b_u) D^T + b_d`, or gated ([`MlpKind`]). x, y: `[t, c]`; U, G: `[f, c]`, D: `[c,
/// f]`, stored as its transpose so that a shard is a run of rows of each.
///
/// Shard k makes hidden columns k and adds its share of y. Backward: `da = dy D_k`,
/// `dh = f'(h) da`, `dx += dh U_k`; `dD_k^T += a^T dy`, `dU_k += dh^T x`.
///
/// Bytes: holds f/N (2c + 1) weights (3c gated) and the replicated b_d; saves t x f or nothing
/// ([`Hidden`]); scratch for one shard's hidden columns, twice (three to five times if gated); a
/// shard travels.
///
/// Source: paper section 3.1; the MLP of GPT-2 and of Llama in Hugging Face transformers.
#[derive(Clone, Debug)]
pub struct Mlp {
    name: String,
    width: usize,
    hidden_width: usize,
    kind: MlpKind,
    hidden: Hidden,
    down_std: f32,
    std: f32,
    bias: (Region, Region),
    /// Hidden before the activation, shard after shard: `[t, f_k]` each (gate, then up, if gated).
    saved: Region,
    /// The same for one shard, if not saved; a plain MLP makes a from it in place.
    passing: Region,
    /// a, for one shard.
    a: Region,
    /// da, then dh (dgate, then dup), for one shard.
    dh: Region,
}

impl Mlp {
    /// An MLP of `hidden_width` columns, weights initially normal with standard deviation 0.02.
    #[must_use]
    pub fn new(name: &str, width: usize, hidden_width: usize, kind: MlpKind) -> Mlp {
        let none = Region::empty(Dtype::F32);
        Mlp {
            name: name.into(),
            width,
            hidden_width,
            kind,
            hidden: Hidden::Saved,
            std: 0.02,
            down_std: 0.02,
            bias: (none, none),
            saved: none,
            passing: none,
            a: none,
            dh: none,
        }
    }

    /// With the hidden activation saved or recomputed.
    #[must_use]
    pub fn hidden(self, hidden: Hidden) -> Mlp {
        Mlp { hidden, ..self }
    }

    /// With these initial standard deviations of the inner and of the outer matrix.
    #[must_use]
    pub fn init_std(self, std: f32, down_std: f32) -> Mlp {
        Mlp { std, down_std, ..self }
    }

    /// As a layer, driven by the strategy.
    #[must_use]
    pub const fn driven(self) -> Driven<Mlp> {
        Driven::new(self)
    }

    const fn gated(&self) -> bool {
        matches!(self.kind, MlpKind::Gated(_))
    }

    /// Hidden columns made per hidden row of a shard: gate and up, or up alone.
    const fn fan(&self) -> usize {
        if self.gated() { 2 } else { 1 }
    }

    /// The inner matrix (gate and up stacked if gated), the bias b_u, the outer matrix.
    fn parts(&self, visit: &Visit, w: Region) -> (Mat, Region, Mat) {
        let (rows, c) = (visit.rows(), self.width);
        let inner = self.fan() * rows * c;
        let bias = if self.gated() { 0 } else { rows };
        let outer = inner + bias;
        (
            Mat::new(w, self.fan() * rows, c),
            w.slice(inner..outer),
            Mat::new(w.slice(outer..outer + rows * c), rows, c),
        )
    }

    /// Where the hidden columns of a shard are between forward and backward, if saved.
    fn hidden_of(&self, cx: &Context<'_>, visit: &Visit) -> Region {
        let (t, fan) = (cx.tokens(), self.fan());
        if self.saved.is_empty() {
            self.passing.first(t * visit.rows() * fan)
        } else {
            let local = &visit.span.local;
            self.saved.slice(t * local.start * fan..t * local.end * fan)
        }
    }

    /// One of the matrices `[t, f_k]` that lie one behind the other in `region`.
    fn part(&self, region: Region, part: usize, len: usize) -> Region {
        region.slice(part * len..(part + 1) * len)
    }

    /// `h = x U^T + b_u`; gated: gate and up.
    fn make_hidden(&self, cx: &Context<'_>, visit: &Visit, w: Region, x: Region) -> Region {
        let (inner, bias, _) = self.parts(visit, w);
        let (t, rows) = (cx.tokens(), visit.rows());
        let h = self.hidden_of(cx, visit);
        let x = Mat::new(x, t, self.width);
        for part in 0..self.fan() {
            let h = Mat::new(self.part(h, part, t * rows), t, rows);
            let w = inner.rows(part * rows..(part + 1) * rows);
            if self.gated() {
                cx.dev.matmul(x, w.t(), h, Write::Set);
            } else {
                cx.dev.bias(bias, h, Write::Set);
                cx.dev.matmul(x, w.t(), h, Write::Add);
            }
        }
        h
    }

    /// `a = f(h)`, or `f(gate) * up`.
    fn activate(&self, cx: &Context<'_>, h: Region, a: Region) {
        match self.kind {
            MlpKind::Plain(f) => cx.dev.activation(f, h, a),
            MlpKind::Gated(f) => {
                cx.dev.gated(f, self.part(h, 0, a.len()), self.part(h, 1, a.len()), a);
            }
        }
    }

    fn matrix(&self, part: &str, layout: Layout, std: f32) -> Tensor {
        let name = format!("{}.{part}.weight", self.name);
        Tensor { name, width: self.width, layout, init: Init::Normal { std }, decay: true }
    }

    /// Every matrix has a row per hidden column. For the outer one that is the order of GPT-2's
    /// Conv1D `[f, c]`, but the transpose of Llama's down_proj `[c, f]`.
    fn tensors(&self) -> Vec<Tensor> {
        if self.gated() {
            return vec![
                self.matrix("gate_proj", Layout::Rows, self.std),
                self.matrix("up_proj", Layout::Rows, self.std),
                self.matrix("down_proj", Layout::Transposed, self.down_std),
            ];
        }
        let bias = Tensor {
            name: format!("{}.c_fc.bias", self.name),
            width: 1,
            layout: Layout::Vector,
            init: Init::Zeros,
            decay: false,
        };
        vec![
            self.matrix("c_fc", Layout::Transposed, self.std),
            bias,
            self.matrix("c_proj", Layout::Rows, self.down_std),
        ]
    }
}

impl Sharded for Mlp {
    fn spec(&self) -> UnitSpec {
        UnitSpec {
            name: self.name.clone(),
            rows: self.hidden_width,
            tensors: self.tensors(),
            blocks: Vec::new(),
            visit_rows_max: usize::MAX,
            backward_reads_weights: true,
        }
    }

    fn width_out(&self, _width_in: usize) -> usize {
        self.width
    }

    fn output(&self) -> Share {
        Share::Sum { width: self.width }
    }

    fn input_gradient(&self) -> Share {
        Share::Sum { width: self.width }
    }

    fn build(&mut self, b: &mut Builder<'_>, width_in: usize, seen: Seen) -> Result<()> {
        expect_width(&self.name, self.width, width_in)?;
        if !self.gated() {
            let name = format!("{}.c_proj.bias", self.name);
            self.bias = b.replicated(name, self.width, Init::Zeros)?;
        }
        let t = b.tokens_max();
        let save = b.options().train && self.hidden == Hidden::Saved;
        self.saved = if save {
            b.kept(Dtype::F32, t * seen.rows * self.fan())
        } else {
            Region::empty(Dtype::F32)
        };
        let shard = t * seen.span_rows_max;
        self.a = b.scratch(Dtype::F32, shard);
        self.passing = match (save, self.gated()) {
            (true, _) => Region::empty(Dtype::F32),
            (false, true) => b.scratch(Dtype::F32, 2 * shard),
            (false, false) => self.a,
        };
        let backward = if b.options().train { shard * self.fan() } else { 0 };
        self.dh = b.scratch(Dtype::F32, backward);
        Ok(())
    }

    fn begin_forward(&self, cx: &Context<'_>, y: Region, write: Write) -> Write {
        if self.gated() {
            return write;
        }
        cx.dev.bias(self.bias.0, Mat::new(y, cx.tokens(), self.width), write);
        Write::Add
    }

    fn begin_backward(&self, cx: &Context<'_>, dy: Region) {
        if !self.gated() {
            cx.dev.bias_backward(Mat::new(dy, cx.tokens(), self.width), self.bias.1);
        }
    }

    fn forward(&self, cx: &Context<'_>, visit: &Visit, w: Region, x: Region, y: Region) {
        let (t, rows) = (cx.tokens(), visit.rows());
        let h = self.make_hidden(cx, visit, w, x);
        let a = self.a.first(t * rows);
        self.activate(cx, h, a);
        let (_, _, outer) = self.parts(visit, w);
        cx.dev.matmul(Mat::new(a, t, rows), outer, Mat::new(y, t, self.width), visit.share());
    }

    fn backward_data(
        &self,
        cx: &Context<'_>,
        visit: &Visit,
        w: Region,
        x: Region,
        dy: Region,
        dx: Region,
    ) {
        let (t, rows, c) = (cx.tokens(), visit.rows(), self.width);
        let (inner, _, outer) = self.parts(visit, w);
        let h = if self.saved.is_empty() {
            self.make_hidden(cx, visit, w, x)
        } else {
            self.hidden_of(cx, visit)
        };
        let a = self.a.first(t * rows);
        let (dy, dx) = (Mat::new(dy, t, c), Mat::new(dx, t, c));
        // dh is finished before a is made, which may overwrite h.
        match self.kind {
            MlpKind::Plain(f) => {
                let dh = self.dh.first(t * rows);
                cx.dev.matmul(dy, outer.t(), Mat::new(dh, t, rows), Write::Set);
                cx.dev.activation_backward(f, h, dh, dh);
            }
            MlpKind::Gated(f) => {
                cx.dev.matmul(dy, outer.t(), Mat::new(a, t, rows), Write::Set);
                let [gate, up] = [0, 1].map(|part| self.part(h, part, t * rows));
                let [dgate, dup] = [0, 1].map(|part| self.part(self.dh, part, t * rows));
                cx.dev.gated_backward(f, gate, up, a, dgate, dup);
            }
        }
        for part in 0..self.fan() {
            let dh = Mat::new(self.part(self.dh, part, t * rows), t, rows);
            let write = if part == 0 { visit.share() } else { Write::Add };
            cx.dev.matmul(dh, inner.rows(part * rows..(part + 1) * rows), dx, write);
        }
        self.activate(cx, h, a);
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
        let (t, rows, c) = (cx.tokens(), visit.rows(), self.width);
        let (inner, bias, outer) = self.parts(visit, dw);
        let x = Mat::new(x, t, c);
        let a = Mat::new(self.a, t, rows);
        cx.dev.matmul(a.t(), Mat::new(dy, t, c), outer, Write::Add);
        for part in 0..self.fan() {
            let dh = Mat::new(self.part(self.dh, part, t * rows), t, rows);
            cx.dev.matmul(dh.t(), x, inner.rows(part * rows..(part + 1) * rows), Write::Add);
            if !self.gated() {
                cx.dev.bias_backward(dh, bias);
            }
        }
    }
}
