//! The device without data: it knows how long kernels take, and does nothing else.
//!
//! A trainer on it runs every line that it runs on a real device (the constructor, the step, the
//! strategy), so there is no second model of training that could drift from the first: what it
//! costs is counted here, one kernel at a time. Regions have sizes but no bytes, so a model of any
//! size fits. What is read back is zero.
//!
//! The operations and bytes of each kernel, which its time is counted from, are at its method.

mod rates;

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Recorder;
use crate::{
    Activation, AdamW, Attention, Clock, Device, KernelKind, KernelSpan, Mat, Memory, Norm,
    OutOfMemory, Profile, Region, Rotary, Sgd, Stream, Write,
};
pub use rates::{MatmulForm, MatmulRates, MatmulTable, Rates};

/// Bytes of an `F32` or `I32`.
const WORD: f64 = 4.0;

/// One rank's device that has a clock and rates in the place of memory and threads.
#[derive(Debug)]
pub struct MetaDevice {
    clock: Clock,
    rates: Rates,
    spent: [Cell<Duration>; KernelKind::ALL.len()],
    recorder: Recorder,
}

impl MetaDevice {
    /// A device whose kernels take the time that `rates` say, on `clock`.
    ///
    /// ```
    /// use rotifer_device::{Clock, Device, Dtype, MetaDevice, Rates, Region};
    ///
    /// let clock = Clock::simulated();
    /// let device = MetaDevice::new(clock.clone(), Rates::counting());
    /// device.fill(Region::empty(Dtype::F32), 0.0);
    /// assert_eq!(clock.now().as_secs(), 0);
    /// ```
    #[must_use]
    pub fn new(clock: Clock, rates: Rates) -> MetaDevice {
        MetaDevice { clock, rates, spent: Default::default(), recorder: Recorder::default() }
    }

    /// Lets a kernel's time pass.
    fn spend(&self, kind: KernelKind, secs: f64) {
        let spent = Duration::from_secs_f64(secs);
        self.clock.wait_until(self.clock.now() + spent);
        let sum = &self.spent[kind as usize];
        sum.set(sum.get() + spent);
        self.recorder.ended(kind, spent);
    }

    /// A kernel that reads and writes so many words in all.
    fn words(&self, kind: KernelKind, words: usize) {
        self.spend(kind, self.rates.streaming_secs(kind, words as f64 * WORD));
    }

    fn attend(&self, shape: &Attention, flops_per_score: f64) {
        // Half of the scores are masked.
        let queries = (shape.batch * shape.heads * shape.seq) as f64;
        let scores = queries * (shape.seq as f64 + 1.0) / 2.0;
        let flops = flops_per_score * scores * shape.head_dim as f64;
        self.spend(KernelKind::Attention, self.rates.attention_secs(flops));
    }
}

const fn area(m: Mat) -> usize {
    m.rows * m.cols
}

impl Device for MetaDevice {
    fn name(&self) -> String {
        "simulated".into()
    }

    fn allocate(&self, bytes: usize) -> Result<Arc<Memory>, OutOfMemory> {
        Ok(Arc::new(Memory::nominal(bytes)))
    }

    fn attach(&self, _memory: &Arc<Memory>) {}

    fn profile(&self) -> Profile {
        std::array::from_fn(|kind| self.spent[kind].get())
    }

    fn record(&self, clock: &Clock) {
        self.recorder.start(clock);
    }

    fn take_spans(&self) -> Vec<KernelSpan> {
        self.recorder.take()
    }

    fn fill(&self, x: Region, _value: f32) {
        self.words(KernelKind::Copy, x.bytes() / 4);
    }

    fn copy(&self, src: Region, dst: Region) {
        if src != dst {
            self.words(KernelKind::Copy, 2 * src.bytes() / 4);
        }
    }

    fn add(&self, src: Region, _dst: Region) {
        self.words(KernelKind::Copy, 3 * src.bytes() / 4);
    }

    fn write_f32(&self, _src: &[f32], _dst: Region) {}

    fn write_i32(&self, _src: &[i32], _dst: Region) {}

    fn write_f64(&self, _src: &[f64], _dst: Region) {}

    fn read_f32(&self, _src: Region, dst: &mut [f32]) {
        dst.fill(0.0);
    }

    fn read_f64(&self, _src: Region, dst: &mut [f64]) {
        dst.fill(0.0);
    }

    /// `2 m n k` operations; a, b and c once.
    fn matmul(&self, a: Mat, b: Mat, c: Mat, _write: Write) {
        let ((m, k), (b_rows, n)) = (a.shape(), b.shape());
        assert!(b_rows == k, "a product of [{m}, {k}] and [{b_rows}, {n}]");
        assert!(c.shape() == (m, n), "a product of [{m}, {n}] into {c:?}");
        let form = MatmulForm::of(&a, &b);
        self.spend(KernelKind::Matmul, self.rates.matmul_secs(form, [m, k, n]));
    }

    /// y written, and read if it is added to.
    fn bias(&self, _b: Region, y: Mat, write: Write) {
        let passes = if write == Write::Add { 2 } else { 1 };
        self.words(KernelKind::Bias, passes * area(y));
    }

    fn bias_backward(&self, dy: Mat, _db: Region) {
        self.words(KernelKind::Bias, area(dy));
    }

    fn norm(&self, _norm: Norm, x: Mat, _w: Region, _b: Region, _y: Mat, _stats: Region) {
        self.words(KernelKind::Norm, 2 * area(x));
    }

    fn norm_backward(
        &self,
        _norm: Norm,
        x: Mat,
        _w: Region,
        _stats: Region,
        _dy: Mat,
        _dx: Mat,
        write: Write,
        _dw: Region,
        _db: Region,
    ) {
        let passes = if write == Write::Add { 4 } else { 3 };
        self.words(KernelKind::Norm, passes * area(x));
    }

    fn activation(&self, _f: Activation, x: Region, _y: Region) {
        self.words(KernelKind::Activation, 2 * x.len());
    }

    fn activation_backward(&self, _f: Activation, x: Region, _dy: Region, _dx: Region) {
        self.words(KernelKind::Activation, 3 * x.len());
    }

    fn gated(&self, _f: Activation, gate: Region, _up: Region, _y: Region) {
        self.words(KernelKind::Activation, 3 * gate.len());
    }

    fn gated_backward(
        &self,
        _f: Activation,
        gate: Region,
        _up: Region,
        _dy: Region,
        _dgate: Region,
        _dup: Region,
    ) {
        self.words(KernelKind::Activation, 5 * gate.len());
    }

    /// Two products of a score's length per score: q k and p v.
    fn attention(&self, shape: &Attention, _qkv: Region, _y: Region, _lse: Region) {
        self.attend(shape, 4.0);
    }

    /// Five products per score: q k again, dy v, and one each for dq, dk and dv.
    fn attention_backward(
        &self,
        shape: &Attention,
        _qkv: Region,
        _y: Region,
        _lse: Region,
        _dy: Region,
        _dqkv: Region,
        _delta: Region,
    ) {
        self.attend(shape, 10.0);
    }

    fn rotary(&self, rotary: &Rotary, _positions: Region, x: Mat) {
        let words = 2 * x.rows * rotary.heads * rotary.head_dim;
        self.spend(
            KernelKind::Attention,
            self.rates.streaming_secs(KernelKind::Copy, words as f64 * WORD),
        );
    }

    /// At most one row for each of the table's, as no ids are known.
    fn embedding(&self, _ids: Region, table: Mat, _first: usize, y: Mat, write: Write) {
        let passes = if write == Write::Add { 3 } else { 2 };
        self.words(KernelKind::Embedding, passes * y.rows.min(table.rows) * y.cols);
    }

    fn embedding_backward(&self, _ids: Region, dy: Mat, dtable: Mat, _first: usize) {
        self.words(KernelKind::Embedding, 3 * dy.rows.min(dtable.rows) * dy.cols);
    }

    fn loss_block(&self, logits: Mat, _first: usize, _targets: Region, _state: Region) {
        self.words(KernelKind::Loss, area(logits));
    }

    fn loss_join(&self, other: Region, _state: Region) {
        self.words(KernelKind::Loss, 3 * other.len());
    }

    fn loss_finish(&self, state: Region, _targets: Region, _lse: Region, _loss: Region) {
        self.words(KernelKind::Loss, state.len());
    }

    fn loss_backward(
        &self,
        logits: Mat,
        _first: usize,
        _targets: Region,
        _lse: Region,
        _scale: f32,
    ) {
        self.words(KernelKind::Loss, 2 * area(logits));
    }

    /// Four reads, three writes.
    fn adamw(&self, _step: &AdamW, w: Region, _g: Region, _m: Region, _v: Region) {
        self.words(KernelKind::Optimizer, 7 * w.len());
    }

    fn sgd(&self, step: &Sgd, w: Region, _g: Region, _m: Region) {
        let passes = if step.momentum == 0.0 { 3 } else { 5 };
        self.words(KernelKind::Optimizer, passes * w.len());
    }

    fn squared_norm(&self, x: Region, _sum: Region) {
        self.words(KernelKind::Optimizer, x.len());
    }

    fn normal(&self, _stream: Stream, _first: u64, _mean: f32, _std: f32, x: Region) {
        self.words(KernelKind::Random, x.len());
    }

    fn uniform(&self, _stream: Stream, _first: u64, _low: f32, _high: f32, x: Region) {
        self.words(KernelKind::Random, x.len());
    }

    fn dropout(&self, _: Stream, _first: u64, _p: f32, x: Region, _y: Region, write: Write) {
        let passes = if write == Write::Add { 3 } else { 2 };
        self.words(KernelKind::Random, passes * x.len());
    }
}
