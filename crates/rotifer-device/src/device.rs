//! The kernels a trainer needs.
//!
//! Shapes: t tokens (batch rows x sequence length), c channels, o outputs, v classes, b batch rows,
//! s sequence length, h query heads, k key/value heads, d channels of one head. All row-major.
//!
//! Every kernel may merely enqueue its work; only the `read_*` methods wait for results. Outputs
//! say whether they are set (`=`) or added to (`+=`); where the caller chooses, a [`Write`] tells.
//! Float regions are `F32` unless a kernel says otherwise; ids and positions are `I32`.
//!
//! # Panics
//! All kernels panic if a region is too short, has another dtype, belongs to memory that the device
//! is not attached to, or if an output overlaps an input (unless the kernel says that it may):
//! these are broken invariants of a layer, never bad input of a user.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::{Clock, KernelSpan, Memory, OutOfMemory, Region};

/// Whether a kernel replaces what its output holds or adds to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// `out = result`
    Set,
    /// `out += result`
    Add,
}

/// A matrix within a region: `rows` rows of `cols` elements, `stride` elements apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mat {
    /// Where it lies. Element (i, j) is `region[offset + i * stride + j]`.
    pub region: Region,
    /// Elements before the first row.
    pub offset: usize,
    /// Number of rows as stored.
    pub rows: usize,
    /// Number of columns as stored.
    pub cols: usize,
    /// Elements from one row to the next.
    pub stride: usize,
    /// Read as its transpose. Only [`Device::matmul`] accepts this, for its inputs.
    pub transposed: bool,
}

impl Mat {
    /// The first `rows * cols` elements of a region as a contiguous matrix.
    #[must_use]
    pub fn new(region: Region, rows: usize, cols: usize) -> Mat {
        Mat { region, offset: 0, rows, cols, stride: cols, transposed: false }
    }

    /// The columns `range` of a matrix: how a shard writes its own columns of y in place.
    ///
    /// # Panics
    /// If they are not within the matrix, or the matrix is transposed.
    #[must_use]
    pub fn columns(self, range: Range<usize>) -> Mat {
        assert!(!self.transposed && range.start <= range.end && range.end <= self.cols);
        Mat { offset: self.offset + range.start, cols: range.end - range.start, ..self }
    }

    /// The rows `range` of a matrix.
    ///
    /// # Panics
    /// If they are not within the matrix, or the matrix is transposed.
    #[must_use]
    pub fn rows(self, range: Range<usize>) -> Mat {
        assert!(!self.transposed && range.start <= range.end && range.end <= self.rows);
        let offset = self.offset + range.start * self.stride;
        Mat { offset, rows: range.end - range.start, ..self }
    }

    /// The transpose, without moving anything.
    #[must_use]
    pub const fn t(self) -> Mat {
        Mat { transposed: !self.transposed, ..self }
    }

    /// Rows and columns as a product sees them.
    #[must_use]
    pub const fn shape(&self) -> (usize, usize) {
        if self.transposed { (self.cols, self.rows) } else { (self.rows, self.cols) }
    }
}

/// Elementwise nonlinearity of an MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// GELU by its tanh approximation, as GPT-2 (`gelu_new`, PyTorch `approximate="tanh"`).
    GeluTanh,
    /// GELU by the error function (PyTorch's default).
    GeluErf,
    /// `x * sigmoid(x)`, as the gate of Llama's MLP.
    Silu,
}

/// Which normalisation over the last dimension.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norm {
    /// `(x - mean) / sqrt(var + eps) * w + b`, biased variance, as PyTorch's `LayerNorm`.
    Layer {
        /// Added to the variance.
        eps: f32,
    },
    /// `x / sqrt(mean(x^2) + eps) * w`, as PyTorch's `RMSNorm`.
    Rms {
        /// Added to the mean square.
        eps: f32,
    },
}

/// Shape and masks of one attention call. Query head i reads key/value head `i / (heads /
/// kv_heads)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// b: batch rows.
    pub batch: usize,
    /// s: tokens per row.
    pub seq: usize,
    /// h: query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// k: key and value heads.
    pub kv_heads: usize,
    /// d: channels per head.
    pub head_dim: usize,
    /// Factor of the scores, usually `1 / sqrt(d)`.
    pub scale: f32,
    /// Document number of each token `[b*s]` (`I32`): a query sees only keys of its own document.
    /// For several samples packed in one row.
    pub documents: Option<Region>,
    /// Number of real tokens of each row `[b]` (`I32`): a query sees only keys before that. A query
    /// that sees no key at all gives zeros.
    pub lengths: Option<Region>,
}

impl Attention {
    /// Columns of the fused projection: h*d of queries, then k*d of keys, then k*d of values.
    #[must_use]
    pub const fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}

/// Rotary position embedding in the half-split form of Llama and GPT-NeoX: channel i of a head is
/// paired with channel i + d/2 and turned by `position * theta^(-2i/d)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// Number of heads to turn, from the first column of the matrix on.
    pub heads: usize,
    /// d: channels per head; even.
    pub head_dim: usize,
    /// Base of the frequencies, usually 10000.
    pub theta: f32,
    /// Turn the other way: what backward needs.
    pub inverse: bool,
}

/// One AdamW update, as `torch.optim.AdamW`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay rate of the first moment.
    pub beta1: f32,
    /// Decay rate of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay: `w -= lr * weight_decay * w` before the update.
    pub weight_decay: f32,
    /// Number of this update, from 1: sets the bias corrections `1 - beta^step`.
    pub step: u64,
    /// Factor applied to the gradient while it is read: clipping costs no pass of its own.
    pub grad_scale: f32,
}

/// One SGD update, as `torch.optim.SGD` with momentum and no dampening; the decay is decoupled, as
/// [`AdamW`]'s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Learning rate of this step.
    pub lr: f32,
    /// `m = momentum * m + g; w -= lr * m`. With 0, m is neither read nor written and may be empty.
    pub momentum: f32,
    /// Decoupled weight decay: `w -= lr * weight_decay * w` before the update.
    pub weight_decay: f32,
    /// Factor applied to the gradient while it is read.
    pub grad_scale: f32,
}

/// A source of random numbers that knows no N: the number at global index i is a pure function of
/// (seed, stream, i), so a shard fills its own part without drawing the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    /// The run's seed.
    pub seed: u64,
    /// Which use of it: one tensor's initial values, one layer's dropout at one step.
    pub stream: u64,
}

/// Kinds of kernels, for the profile of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the documentation")]
pub enum KernelKind {
    Matmul,
    Attention,
    Norm,
    Activation,
    Loss,
    Embedding,
    Bias,
    Optimizer,
    Random,
    Copy,
}

impl KernelKind {
    /// All kinds, in the order in which a profile lists them.
    pub const ALL: [KernelKind; 10] = [
        KernelKind::Matmul,
        KernelKind::Attention,
        KernelKind::Norm,
        KernelKind::Activation,
        KernelKind::Loss,
        KernelKind::Embedding,
        KernelKind::Bias,
        KernelKind::Optimizer,
        KernelKind::Random,
        KernelKind::Copy,
    ];
}

/// Time spent per kind of kernel since the device was made, indexed by `KernelKind as usize`.
pub type Profile = [Duration; KernelKind::ALL.len()];

/// Memory and maths of one rank's device. Object-safe: layers take `&dyn Device`.
pub trait Device {
    /// What it is, for logs.
    fn name(&self) -> String;

    /// A zeroed block of this device's memory.
    ///
    /// # Errors
    /// If there is not so much.
    fn allocate(&self, bytes: usize) -> Result<Arc<Memory>, OutOfMemory>;

    /// Lets kernels touch regions of `memory`, and keeps it alive as long as the device. Attaching
    /// again does nothing.
    fn attach(&self, memory: &Arc<Memory>);

    /// Time per kind of kernel so far.
    fn profile(&self) -> Profile;

    /// From now on keeps when each kernel ran, by `clock`, which takes memory as it goes.
    fn record(&self, clock: &Clock);

    /// What has been recorded since the last call.
    fn take_spans(&self) -> Vec<KernelSpan>;

    // ---- moving data ----

    /// `x = value` (`F32` or `F64`).
    fn fill(&self, x: Region, value: f32);
    /// `dst = src`, any dtype; both of one length and dtype. They may be the same region, but not
    /// overlap otherwise.
    fn copy(&self, src: Region, dst: Region);
    /// `dst += src`, `F32` or `F64`.
    fn add(&self, src: Region, dst: Region);
    /// Host to device, `F32`.
    fn write_f32(&self, src: &[f32], dst: Region);
    /// Host to device, `I32`.
    fn write_i32(&self, src: &[i32], dst: Region);
    /// Host to device, `F64`.
    fn write_f64(&self, src: &[f64], dst: Region);
    /// Device to host, `F32`; waits.
    fn read_f32(&self, src: Region, dst: &mut [f32]);
    /// Device to host, `F64`; waits.
    fn read_f64(&self, src: Region, dst: &mut [f64]);

    // ---- linear maths ----

    /// `c = a b` or `c += a b`. a: `[m, k]`, b: `[k, n]`, c: `[m, n]` not transposed; any strides,
    /// so that a shard writes its columns of a wider c. A product with k = 0 sets zeros or adds
    /// nothing.
    fn matmul(&self, a: Mat, b: Mat, c: Mat, write: Write);
    /// `y[i, :] = b` or `+= b`. y: `[t, o]` strided, b: `[o]`.
    fn bias(&self, b: Region, y: Mat, write: Write);
    /// `db += sum over i of dy[i, :]`. dy: `[t, o]` strided, db: `[o]`. Sums in an order that
    /// depends on t and o alone.
    fn bias_backward(&self, dy: Mat, db: Region);

    // ---- normalisation ----

    /// `y = norm(x)`; `stats = (mean, 1/std)` per token ((0, 1/rms) for RMS).
    /// x, y: `[t, c]`; w: `[c]`; b: `[c]` or empty; stats: `[t, 2]`.
    fn norm(&self, norm: Norm, x: Mat, w: Region, b: Region, y: Mat, stats: Region);
    /// Backward of [`norm`](Device::norm): `dx = ...` or `+=` by `write`; `dw +=`, `db +=` (db may
    /// be empty). x, dy, dx: `[t, c]`; stats as saved by forward. Sums for dw and db in an order
    /// that depends on t and c alone. dx may be dy when `write` is `Set`.
    #[expect(clippy::too_many_arguments, reason = "each is one operand of the equation")]
    fn norm_backward(
        &self,
        norm: Norm,
        x: Mat,
        w: Region,
        stats: Region,
        dy: Mat,
        dx: Mat,
        write: Write,
        dw: Region,
        db: Region,
    );

    // ---- nonlinearities ----

    /// `y = f(x)`; y may be x. Equal lengths.
    fn activation(&self, f: Activation, x: Region, y: Region);
    /// `dx = f'(x) * dy`; dx may be dy.
    fn activation_backward(&self, f: Activation, x: Region, dy: Region, dx: Region);
    /// `y = f(gate) * up`; y may be gate or up.
    fn gated(&self, f: Activation, gate: Region, up: Region, y: Region);
    /// Backward of [`gated`](Device::gated): `dgate = f'(gate) * up * dy`, `dup = f(gate) * dy`;
    /// dup may be dy; dgate may be neither.
    fn gated_backward(
        &self,
        f: Activation,
        gate: Region,
        up: Region,
        dy: Region,
        dgate: Region,
        dup: Region,
    );

    // ---- attention ----

    /// Causal attention without a score matrix. qkv: `[b*s, (h + 2k)*d]` (see
    /// [`Attention::qkv_width`]); `y = softmax(scale q k^T) v`: `[b*s, h*d]`; `lse = log sum exp`
    /// of each query's scores: `[b, h, s]`, which backward needs.
    fn attention(&self, shape: &Attention, qkv: Region, y: Region, lse: Region);
    /// Backward of [`attention`](Device::attention): `dqkv =`. delta: `[b, h, s]`, scratch.
    #[expect(clippy::too_many_arguments, reason = "each is one operand of the equation")]
    fn attention_backward(
        &self,
        shape: &Attention,
        qkv: Region,
        y: Region,
        lse: Region,
        dy: Region,
        dqkv: Region,
        delta: Region,
    );
    /// Turns the leading heads of each row of x in place. x: `[t, >= heads*d]` strided; positions:
    /// `[t]`.
    fn rotary(&self, rotary: &Rotary, positions: Region, x: Mat);

    // ---- embedding ----

    /// `y[i, :] = table[ids[i] - first, :]`, or `+=`, for those tokens whose id lies in `first ..
    /// first + table.rows`; other rows are left alone. ids: `[t]`; table: `[v, c]`; y: `[t, c]`.
    fn embedding(&self, ids: Region, table: Mat, first: usize, y: Mat, write: Write);
    /// `dtable[ids[i] - first, :] += dy[i, :]` for the same tokens, in the order of i.
    fn embedding_backward(&self, ids: Region, dy: Mat, dtable: Mat, first: usize);

    // ---- loss ----

    /// One block of classes of an online softmax. logits: `[t, v_k]` for the classes from `first`
    /// on; targets: `[t]`; state: `[t, 3]` = (running max, running sum of exp(logit - max), logit
    /// of the target), to begin with (-inf, 0, 0).
    fn loss_block(&self, logits: Mat, first: usize, targets: Region, state: Region);
    /// Joins the states of two sets of classes that have none in common: `state = state + other`.
    /// Both: `[t, 3]` as [`loss_block`](Device::loss_block) leaves them; a target is in one of
    /// them.
    fn loss_join(&self, other: Region, state: Region);
    /// Ends it: `lse[i] = max + ln(sum)`; `loss += sum over i of lse[i] - target logit`, over
    /// tokens whose target is not negative (a negative target is ignored). state: `[t, 3]`; lse:
    /// `[t]`; loss: `[1]` `F64`. Sums in an order that depends on t alone.
    fn loss_finish(&self, state: Region, targets: Region, lse: Region, loss: Region);
    /// `logits[i, j] = (exp(logits[i, j] - lse[i]) - [first + j == targets[i]]) * scale`, in place:
    /// the gradient; zero for ignored tokens.
    fn loss_backward(&self, logits: Mat, first: usize, targets: Region, lse: Region, scale: f32);

    // ---- optimiser ----

    /// One fused update of w and both moments, all `[n]`.
    fn adamw(&self, step: &AdamW, w: Region, g: Region, m: Region, v: Region);
    /// One fused update of w and the momentum, all `[n]`.
    fn sgd(&self, step: &Sgd, w: Region, g: Region, m: Region);
    /// `sum += sum of x[i]^2`, in `F64`. x: `[n]`; sum: `[1]` `F64`. Sums in an order that depends
    /// on n alone.
    fn squared_norm(&self, x: Region, sum: Region);

    // ---- randomness ----

    /// `x[i] = mean + std * normal(stream, first + i)`, by Box-Muller over a counter-based
    /// generator.
    fn normal(&self, stream: Stream, first: u64, mean: f32, std: f32, x: Region);
    /// `x[i] = low + (high - low) * uniform(stream, first + i)`, in `[low, high)`.
    fn uniform(&self, stream: Stream, first: u64, low: f32, high: f32, x: Region);
    /// Inverted dropout: `y[i] = x[i] / (1 - p)` where `uniform(stream, first + i) >= p`, else 0;
    /// or `y +=` that. Its own backward. y may be x when `write` is `Set`.
    fn dropout(&self, stream: Stream, first: u64, p: f32, x: Region, y: Region, write: Write);
}
