//! The language-model head, cut along the vocabulary and fused with the loss.

use rotifer_device::{Dtype, Mat, Region, Write};

use super::embedding::table_spec;
use super::linear::expect_width;
use crate::build::{Builder, Unit, UnitSpec};
use crate::error::Result;
use crate::layer::Context;
use crate::params::Init;
use crate::sharded::{Seen, Sharded, Share, Visit};
use crate::strategy::{self, Driver, Strategy};

/// What becomes of the logits between forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// Made again in backward: they never exist for more than one shard and `ROWS` (512) tokens.
    Recomputed,
    /// This rank's own, t x v of them, are kept: one product of the head in four is saved.
    Kept,
}

/// Tokens whose logits exist at once when they are not kept: enough for the products to run at full
/// speed.
pub const ROWS: usize = 512;

/// Most classes in one shard. Bounds the logits on a single rank, where nothing else cuts the
/// table.
pub(super) const CLASSES_MAX: usize = 4096;

/// `loss = sum over tokens of -log softmax(x W^T)[target]`. x: `[t, c]`, W: `[v, c]`.
///
/// Shard k makes the logits of its classes; a running maximum and sum per token join the shards
/// (online softmax). Backward makes each shard's logits again: `d_k = (softmax - onehot) scale`,
/// `dx += d_k W_k`, `dW_k += d_k^T x`. Negative targets are ignored.
///
/// Bytes: holds v/N x c weights (none of its own if tied); saves 4 t, and t x v if the logits are
/// kept; scratch for `ROWS` (512) x one shard's classes; a shard travels.
///
/// Source: paper section 3.1 for the cut; Milakov and Gimelshein 2018 for the online softmax;
/// `torch.nn.functional.cross_entropy(ignore_index=-1)`.
#[derive(Debug)]
pub struct LmHead {
    maths: Head,
    unit: Option<Unit>,
    /// `[t, 3]`: running maximum, running sum, target's logit.
    state: Region,
    /// `[t]`
    lse: Region,
    /// (-inf, 0, 0): where every token's state starts.
    fresh: Region,
    /// `[n, t, 3]`: every rank's state, if ranks see the same tokens and other classes.
    states: Region,
}

#[derive(Clone, Debug)]
struct Head {
    name: String,
    classes: usize,
    width: usize,
    init: Init,
    logits: Logits,
    /// `[t, v_k]` for shard after shard if kept, else [ROWS, v_k] for one.
    block: Region,
}

impl LmHead {
    /// A head for `classes` classes with weights `name.weight`. If an embedding of the same name
    /// and shape exists in the model, the two are tied: one table, one gradient, one optimiser
    /// state.
    #[must_use]
    pub fn new(name: &str, classes: usize, width: usize, std: f32) -> LmHead {
        let none = Region::empty(Dtype::F32);
        let maths = Head {
            name: name.into(),
            classes,
            width,
            init: Init::Normal { std },
            logits: Logits::Recomputed,
            block: none,
        };
        LmHead { maths, unit: None, state: none, lse: none, fresh: none, states: none }
    }

    /// With the logits kept or recomputed.
    #[must_use]
    pub fn logits_are(mut self, logits: Logits) -> LmHead {
        self.maths.logits = logits;
        self
    }

    /// Number of classes.
    #[must_use]
    pub const fn classes(&self) -> usize {
        self.maths.classes
    }

    /// Asks for the table, the state and the scratch.
    ///
    /// # Errors
    /// If the input has another width than the table.
    pub fn build(&mut self, b: &mut Builder<'_>, width_in: usize) -> Result<()> {
        expect_width(&self.maths.name, self.maths.width, width_in)?;
        let unit = b.unit(self.maths.spec())?;
        let t = b.tokens_max();
        self.state = b.kept(Dtype::F32, 3 * t);
        self.lse = b.kept(Dtype::F32, t);
        self.fresh = b.input(Dtype::F32, 3);
        let joined = if b.strategy() == Strategy::Tp && b.world() > 1 { b.world() } else { 0 };
        self.states = b.scratch(Dtype::F32, joined * 3 * t);
        b.include_share(self.maths.input_gradient());
        let keep = b.options().train && self.maths.logits == Logits::Kept;
        self.maths.block = if keep {
            b.kept(Dtype::F32, t * unit.seen().rows)
        } else {
            self.maths.logits = Logits::Recomputed;
            b.scratch(Dtype::F32, t.min(ROWS) * unit.seen().span_rows_max)
        };
        self.unit = Some(unit);
        Ok(())
    }

    /// `cx.loss +=` the loss summed over this rank's tokens.
    ///
    /// # Errors
    /// If a neighbour in the ring fails.
    pub fn forward(&self, cx: &Context<'_>, x: Region) -> Result<()> {
        let t = cx.tokens();
        let (state, lse) = (self.state.first(3 * t), self.lse.first(t));
        cx.dev.write_f32(&[f32::NEG_INFINITY, 0.0, 0.0], self.fresh);
        cx.dev.bias(self.fresh, Mat::new(state, t, 3), Write::Set);
        strategy::forward(cx, &self.maths, self.unit(), x, state, Write::Set)?;
        if let (Driver::Stationary(stationary), false) = (cx.driver, self.states.is_empty()) {
            let states = self.states.first(cx.comm().world() * state.len());
            stationary.join_losses(cx.dev, state, states)?;
        }
        cx.dev.loss_finish(state, cx.batch.targets.first(t), lse, cx.loss);
        Ok(())
    }

    /// `dx =` the gradient of the loss times `cx.loss_scale`.
    ///
    /// # Errors
    /// If a neighbour in the ring fails.
    pub fn backward(&self, cx: &Context<'_>, x: Region, dx: Region) -> Result<()> {
        let lse = self.lse.first(cx.tokens());
        strategy::backward(cx, &self.maths, self.unit(), x, lse, dx, Write::Set)
    }

    /// `logits = x W^T` for `rows` rows, for sampling. x: `[rows, c]`; logits: `[rows, v]`.
    ///
    /// # Errors
    /// If a neighbour in the ring fails.
    pub fn logits(&self, cx: &Context<'_>, x: Region, logits: Region, rows: usize) -> Result<()> {
        let Head { classes, width, .. } = self.maths;
        let y = Mat::new(logits, rows, classes);
        let cut = !self.states.is_empty();
        if cut {
            cx.dev.fill(logits.first(rows * classes), 0.0);
        }
        cx.driver.visit(cx.dev, self.unit(), |span, w| {
            let here = span.first_row..span.first_row + span.local.len();
            let w = Mat::new(w, here.len(), width);
            cx.dev.matmul(Mat::new(x, rows, width), w.t(), y.columns(here), Write::Set);
        })?;
        if cut {
            cx.comm().all_reduce(cx.dev, logits.first(rows * classes))?;
        }
        Ok(())
    }

    fn unit(&self) -> &Unit {
        self.unit.as_ref().expect("layers are built before they run")
    }
}

impl Head {
    /// The tokens of each block of rows.
    fn blocks(&self, cx: &Context<'_>) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
        let t = cx.tokens();
        let rows = if self.logits == Logits::Kept { t.max(1) } else { ROWS };
        (0..t).step_by(rows).map(move |at| at..(at + rows).min(t))
    }

    /// Where the logits of a block of tokens and a shard's classes are.
    fn logits_of(&self, cx: &Context<'_>, visit: &Visit, tokens: usize) -> Mat {
        let classes = visit.rows();
        let place = match self.logits {
            Logits::Recomputed => self.block,
            Logits::Kept => {
                let (t, local) = (cx.tokens(), &visit.span.local);
                self.block.slice(t * local.start..t * local.end)
            }
        };
        Mat::new(place, tokens, classes)
    }

    fn x(&self, x: Region, tokens: &std::ops::Range<usize>) -> Mat {
        Mat::new(x, tokens.end, self.width).rows(tokens.clone())
    }

    /// `logits = x W_k^T` for a block of tokens.
    fn make_logits(
        &self,
        cx: &Context<'_>,
        visit: &Visit,
        w: Region,
        x: Region,
        tokens: &std::ops::Range<usize>,
    ) -> Mat {
        let logits = self.logits_of(cx, visit, tokens.len());
        let w = Mat::new(w, visit.rows(), self.width);
        cx.dev.matmul(self.x(x, tokens), w.t(), logits, Write::Set);
        logits
    }

    /// Turns a block's logits into their gradient, and adds its share to dx.
    #[expect(clippy::too_many_arguments, reason = "the operands of one equation")]
    fn data_block(
        &self,
        cx: &Context<'_>,
        visit: &Visit,
        w: Region,
        x: Region,
        lse: Region,
        dx: Region,
        tokens: &std::ops::Range<usize>,
    ) {
        let d = match self.logits {
            Logits::Kept => self.logits_of(cx, visit, tokens.len()),
            Logits::Recomputed => self.make_logits(cx, visit, w, x, tokens),
        };
        let targets = cx.batch.targets.slice(tokens.clone());
        let lse = lse.slice(tokens.clone());
        cx.dev.loss_backward(d, visit.span.first_row, targets, lse, cx.loss_scale);
        let w = Mat::new(w, visit.rows(), self.width);
        let dx = Mat::new(dx, tokens.end, self.width).rows(tokens.clone());
        cx.dev.matmul(d, w, dx, visit.share());
    }
}

impl Sharded for Head {
    fn spec(&self) -> UnitSpec {
        table_spec(&self.name, self.classes, self.width, self.init, true)
    }

    fn width_out(&self, _width_in: usize) -> usize {
        self.classes
    }

    /// A state of its own, which the head joins with the other ranks'.
    fn output(&self) -> Share {
        Share::Columns
    }

    fn input_gradient(&self) -> Share {
        Share::Sum { width: self.width }
    }

    fn backward_weights_writes_dx(&self) -> bool {
        true
    }

    fn build(&mut self, _b: &mut Builder<'_>, _width_in: usize, _seen: Seen) -> Result<()> {
        Ok(())
    }

    /// y is the state of the online softmax.
    fn forward(&self, cx: &Context<'_>, visit: &Visit, w: Region, x: Region, y: Region) {
        for tokens in self.blocks(cx) {
            let logits = self.make_logits(cx, visit, w, x, &tokens);
            let targets = cx.batch.targets.slice(tokens.clone());
            let state = y.slice(3 * tokens.start..3 * tokens.end);
            cx.dev.loss_block(logits, visit.span.first_row, targets, state);
        }
    }

    /// dy is the log of the sum of exponentials. Only the first block of tokens: as much work as a
    /// travelling gradient needs to hide behind, and no more, because the block's gradient must
    /// stay in the one buffer until that arrives.
    fn backward_data(
        &self,
        cx: &Context<'_>,
        visit: &Visit,
        w: Region,
        x: Region,
        dy: Region,
        dx: Region,
    ) {
        if let Some(tokens) = self.blocks(cx).next() {
            self.data_block(cx, visit, w, x, dy, dx, &tokens);
        }
    }

    fn backward_weights(
        &self,
        cx: &Context<'_>,
        visit: &Visit,
        w: Region,
        x: Region,
        dy: Region,
        dx: Region,
        dw: Region,
    ) {
        let dw = Mat::new(dw, visit.rows(), self.width);
        for tokens in self.blocks(cx) {
            if tokens.start > 0 {
                self.data_block(cx, visit, w, x, dy, dx, &tokens);
            }
            let d = self.logits_of(cx, visit, tokens.len());
            cx.dev.matmul(d.t(), self.x(x, &tokens), dw, Write::Add);
        }
    }
}
