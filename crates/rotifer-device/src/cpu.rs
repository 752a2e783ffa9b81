//! The fast device: kernels on this machine's processor.
//!
//! This file checks what each kernel is given and forwards it; the kernels are the modules below.
//! `team` says how they use threads and vectors, `view` why their raw pointers are sound.

#![expect(
    clippy::needless_range_loop,
    reason = "one index into several arrays of fixed length is what vectorises, and reads best"
)]

mod activation;
mod attention;
mod attention_backward;
mod bias;
mod data;
mod embedding;
mod loss;
mod matmul;
mod norm;
mod optimizer;
mod random;
mod rotary;
mod simd;
mod team;
mod tile;
mod view;

#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock::Recorder;
use crate::{
    Activation, AdamW, Attention, Clock, Device, Dtype, KernelKind, KernelSpan, Mat, Memory, Norm,
    OutOfMemory, Profile, Region, Rotary, Sgd, Stream, Write,
};
use attention::{Call, Shape};
use team::Team;
use view::{Rows, Span, assert_apart, flat};

/// The processor's cores, or some of them, as one rank's device.
///
/// Results do not depend on the number of threads, to the bit. Kernels allocate nothing: each
/// thread has its buffers for packing the operands of products (1.25 MiB) from the start.
///
/// A device belongs to the one thread that calls its kernels (it is not `Sync`). With more than one
/// thread that should be a thread of the device's own pool, as [`run`](CpuDevice::run) arranges:
/// then a kernel splits its work by pushing it on the thread's own queue, where idle threads find
/// it; called from elsewhere it would have to inject the work in rayon's global pool, which takes
/// allocations and a context switch per kernel, and as many threads as that pool has.
#[derive(Debug)]
pub struct CpuDevice {
    team: Team,
    memories: RefCell<Vec<Arc<Memory>>>,
    spent: [Cell<Duration>; KernelKind::ALL.len()],
    recorder: Recorder,
}

impl CpuDevice {
    /// A device whose kernels use `threads` threads. With one they run on the calling thread, and
    /// nothing of a thread pool is touched. For more, see [`run`](CpuDevice::run).
    ///
    /// # Panics
    /// If `threads` is 0.
    #[must_use]
    pub fn new(threads: usize) -> CpuDevice {
        assert!(threads > 0, "a device of no threads");
        matmul::prepare_thread();
        CpuDevice {
            team: Team { arch: pulp::Arch::new(), threads },
            memories: RefCell::new(Vec::new()),
            spent: Default::default(),
            recorder: Recorder::default(),
        }
    }

    /// Runs `f` with a device of `threads` threads, on the first of them: the way to run a rank.
    ///
    /// With one thread `f` runs on the calling thread. With more, a pool of that many threads is
    /// made, `f` runs as a task of it while the calling thread sleeps, and the pool ends with it. A
    /// panic of `f` or of a kernel is passed on.
    ///
    /// # Errors
    /// If the operating system refuses the threads.
    ///
    /// # Panics
    /// If `threads` is 0.
    ///
    /// ```
    /// use rotifer_device::{Arena, CpuDevice, Device, Dtype, Purpose};
    ///
    /// let sum = CpuDevice::run(2, |device| {
    ///     let mut counting = Arena::counting();
    ///     counting.take(Purpose::Weights, Dtype::F32, 3);
    ///     let mut arena = Arena::live(device, &counting.plan()).expect("a few bytes");
    ///     let x = arena.take(Purpose::Weights, Dtype::F32, 3);
    ///     device.fill(x, 2.0);
    ///     let mut values = [0.0; 3];
    ///     device.read_f32(x, &mut values);
    ///     values.iter().sum::<f32>()
    /// })?;
    /// assert_eq!(sum, 6.0);
    /// # Ok::<(), rotifer_device::ThreadsError>(())
    /// ```
    pub fn run<R: Send>(
        threads: usize,
        f: impl FnOnce(&CpuDevice) -> R + Send,
    ) -> Result<R, ThreadsError> {
        if threads <= 1 {
            return Ok(f(&CpuDevice::new(threads)));
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("kernel {i}"))
            .start_handler(|_| matmul::prepare_thread())
            .build()
            .map_err(|source| ThreadsError { threads, source })?;
        Ok(pool.install(|| f(&CpuDevice::new(threads))))
    }

    /// Number of threads.
    #[must_use]
    pub const fn threads(&self) -> usize {
        self.team.threads
    }

    /// Runs a kernel and books its time.
    fn timed(&self, kind: KernelKind, kernel: impl FnOnce(Team)) {
        let start = Instant::now();
        kernel(self.team);
        let spent = start.elapsed();
        let sum = &self.spent[kind as usize];
        sum.set(sum.get() + spent);
        self.recorder.ended(kind, spent);
    }

    /// Address of a region that must hold `len` elements of type `dtype`.
    fn resolve(&self, region: Region, dtype: Dtype, len: usize) -> *mut u8 {
        assert!(region.dtype == dtype, "a kernel wants {dtype:?}, not {region:?}");
        assert!(region.len >= len, "a kernel wants {len} elements, not {region:?}");
        if len == 0 {
            return std::ptr::without_provenance_mut(64);
        }
        let memories = self.memories.borrow();
        let memory = memories.iter().find(|memory| memory.id() == region.memory);
        let memory = memory.unwrap_or_else(|| panic!("{region:?} is not memory of this device"));
        assert!(region.offset + region.bytes() <= memory.bytes(), "{region:?} is out of bounds");
        assert!(region.offset.is_multiple_of(dtype.bytes()), "{region:?} is not aligned");
        memory.ptr().wrapping_add(region.offset)
    }

    /// The first `len` elements of a float region.
    fn floats(&self, region: Region, len: usize) -> Span<f32> {
        Span::new(self.resolve(region, Dtype::F32, len).cast(), len)
    }

    /// All of a float region.
    fn all(&self, region: Region) -> Span<f32> {
        self.floats(region, region.len)
    }

    /// A float region that may be absent.
    fn optional(&self, region: Region, len: usize) -> Option<Span<f32>> {
        (!region.is_empty()).then(|| self.floats(region, len))
    }

    /// The first `len` elements of an integer region.
    fn ints(&self, region: Region, len: usize) -> Span<i32> {
        Span::new(self.resolve(region, Dtype::I32, len).cast(), len)
    }

    /// The first `len` elements of a region of doubles.
    fn doubles(&self, region: Region, len: usize) -> Span<f64> {
        Span::new(self.resolve(region, Dtype::F64, len).cast(), len)
    }

    /// A matrix, as it lies in memory.
    fn rows(&self, m: Mat) -> Rows {
        let len = match (m.rows, m.cols) {
            (0, _) | (_, 0) => 0,
            _ => m.offset + (m.rows - 1) * m.stride + m.cols,
        };
        assert!(m.rows <= 1 || m.stride >= m.cols, "rows that overlap: {m:?}");
        let start: *mut f32 = self.resolve(m.region, Dtype::F32, len).cast();
        Rows::new(start.wrapping_add(m.offset), m.rows, m.cols, m.stride)
    }

    /// A matrix of `rows` by `cols`, not transposed.
    fn shaped(&self, m: Mat, rows: usize, cols: usize) -> Rows {
        assert!(!m.transposed && (m.rows, m.cols) == (rows, cols), "not [{rows}, {cols}]: {m:?}");
        self.rows(m)
    }

    /// An input of a product, as the product reads it.
    fn operand(&self, m: Mat) -> matmul::Operand {
        let rows = self.rows(m);
        let (rs, cs) = if m.transposed { (1, m.stride) } else { (m.stride, 1) };
        matmul::Operand { ptr: rows.ptr(0), rs, cs }
    }

    fn attention_call(&self, shape: &Attention, qkv: Region) -> Call {
        let Attention { batch, seq, heads, kv_heads, head_dim, scale, documents, lengths } = *shape;
        Call {
            shape: Shape { batch, seq, heads, kv_heads, head_dim, scale },
            qkv: self.floats(qkv, batch * seq * shape.qkv_width()),
            documents: documents.map(|documents| self.ints(documents, batch * seq)),
            lengths: lengths.map(|lengths| self.ints(lengths, batch)),
        }
    }
}

/// The operating system refused the threads of a device.
#[derive(Debug, thiserror::Error)]
#[error("cannot start {threads} threads for one rank's kernels; ask for fewer")]
pub struct ThreadsError {
    threads: usize,
    source: rayon::ThreadPoolBuildError,
}

/// Panics unless the two are one and the same region, or share no byte.
fn assert_same_or_apart(output: Region, input: Region) {
    assert!(
        output == input || !output.overlaps(&input),
        "an output overlaps an input in part: {output:?}, {input:?}"
    );
}

/// The masks of an attention call; empty regions where there are none.
fn masks(shape: &Attention) -> [Region; 2] {
    [shape.documents, shape.lengths].map(|mask| mask.unwrap_or(Region::empty(Dtype::I32)))
}

impl Device for CpuDevice {
    fn name(&self) -> String {
        format!("cpu, {} thread(s), {}", self.team.threads, self.team.instruction_set())
    }

    fn allocate(&self, bytes: usize) -> Result<Arc<Memory>, OutOfMemory> {
        Memory::host(bytes).map(Arc::new)
    }

    fn attach(&self, memory: &Arc<Memory>) {
        let mut memories = self.memories.borrow_mut();
        if memories.iter().all(|known| known.id() != memory.id()) {
            memories.push(Arc::clone(memory));
        }
    }

    fn profile(&self) -> Profile {
        std::array::from_fn(|kind| self.spent[kind].get())
    }

    fn record(&self, clock: &Clock) {
        self.recorder.start(clock);
    }

    fn take_spans(&self) -> Vec<KernelSpan> {
        self.recorder.take()
    }

    fn fill(&self, x: Region, value: f32) {
        self.timed(KernelKind::Copy, |team| match x.dtype {
            Dtype::F64 => data::fill(team, self.doubles(x, x.len), f64::from(value)),
            _ => data::fill(team, self.all(x), value),
        });
    }

    fn copy(&self, src: Region, dst: Region) {
        assert!(src.len == dst.len && src.dtype == dst.dtype, "copy of {src:?} to {dst:?}");
        assert_same_or_apart(dst, src);
        if src == dst {
            return;
        }
        let bytes = |r: Region| Span::new(self.resolve(r, r.dtype, r.len), r.bytes());
        let (src, dst) = (bytes(src), bytes(dst));
        self.timed(KernelKind::Copy, |team| data::copy(team, src, dst));
    }

    fn add(&self, src: Region, dst: Region) {
        assert!(src.len == dst.len && src.dtype == dst.dtype, "add of {src:?} to {dst:?}");
        assert_apart(&[flat(dst)], &[flat(src)]);
        self.timed(KernelKind::Copy, |team| match src.dtype {
            Dtype::F64 => data::add_f64(self.doubles(src, src.len), self.doubles(dst, src.len)),
            _ => data::add(team, self.all(src), self.all(dst)),
        });
    }

    fn write_f32(&self, src: &[f32], dst: Region) {
        data::write(src, self.floats(dst, src.len()));
    }

    fn write_i32(&self, src: &[i32], dst: Region) {
        data::write(src, self.ints(dst, src.len()));
    }

    fn write_f64(&self, src: &[f64], dst: Region) {
        data::write(src, self.doubles(dst, src.len()));
    }

    fn read_f32(&self, src: Region, dst: &mut [f32]) {
        data::read(self.floats(src, dst.len()), dst);
    }

    fn read_f64(&self, src: Region, dst: &mut [f64]) {
        data::read(self.doubles(src, dst.len()), dst);
    }

    fn matmul(&self, a: Mat, b: Mat, c: Mat, write: Write) {
        let ((m, k), (b_rows, n)) = (a.shape(), b.shape());
        assert!(b_rows == k, "a product of [{m}, {k}] and [{b_rows}, {n}]");
        assert_apart(&[c], &[a, b]);
        let c = self.shaped(c, m, n);
        let (a, b) = (self.operand(a), self.operand(b));
        let add = write == Write::Add;
        let product = matmul::Product { m, n, k, a, b, c: c.ptr(0), c_rs: c.stride, add };
        // SAFETY: the operands were resolved with the shapes that the product has, and c is apart.
        self.timed(KernelKind::Matmul, |team| unsafe { matmul::matmul(team, product) });
    }

    fn bias(&self, b: Region, y: Mat, write: Write) {
        assert_apart(&[y], &[flat(b)]);
        let (b, y) = (self.floats(b, y.cols), self.shaped(y, y.rows, y.cols));
        self.timed(KernelKind::Bias, |team| bias::bias(team, b, y, write == Write::Add));
    }

    fn bias_backward(&self, dy: Mat, db: Region) {
        assert_apart(&[flat(db)], &[dy]);
        let (dy, db) = (self.shaped(dy, dy.rows, dy.cols), self.floats(db, dy.cols));
        self.timed(KernelKind::Bias, |team| bias::backward(team, dy, db));
    }

    fn norm(&self, norm: Norm, x: Mat, w: Region, b: Region, y: Mat, stats: Region) {
        assert_apart(&[y, flat(stats)], &[x, flat(w), flat(b)]);
        let (t, c) = (x.rows, x.cols);
        let (x, y) = (self.shaped(x, t, c), self.shaped(y, t, c));
        let (w, b, stats) = (self.floats(w, c), self.optional(b, c), self.floats(stats, 2 * t));
        self.timed(KernelKind::Norm, |team| norm::forward(team, norm, x, [w, stats], b, y));
    }

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
    ) {
        let (t, c) = (x.rows, x.cols);
        assert_apart(&[dx, flat(dw), flat(db)], &[x, flat(w), flat(stats)]);
        assert_apart(&[flat(dw), flat(db)], &[dy]);
        if write == Write::Add || dx != dy {
            assert_apart(&[dx], &[dy]);
        }
        let backward = norm::Backward {
            x: self.shaped(x, t, c),
            w: self.floats(w, c),
            stats: self.floats(stats, 2 * t),
            dy: self.shaped(dy, t, c),
            dx: self.shaped(dx, t, c),
            add: write == Write::Add,
            dw: self.floats(dw, c),
            db: self.optional(db, c),
        };
        self.timed(KernelKind::Norm, |team| norm::backward(team, norm, backward));
    }

    fn activation(&self, f: Activation, x: Region, y: Region) {
        assert_same_or_apart(y, x);
        let (x, y) = (self.all(x), self.all(y));
        self.timed(KernelKind::Activation, |team| activation::activation(team, f, x, y));
    }

    fn activation_backward(&self, f: Activation, x: Region, dy: Region, dx: Region) {
        assert_same_or_apart(dx, dy);
        assert_apart(&[flat(dx)], &[flat(x)]);
        let spans = [x, dy, dx].map(|region| self.all(region));
        self.timed(KernelKind::Activation, |team| activation::backward(team, f, spans));
    }

    fn gated(&self, f: Activation, gate: Region, up: Region, y: Region) {
        assert_same_or_apart(y, gate);
        assert_same_or_apart(y, up);
        let spans = [gate, up, y].map(|region| self.all(region));
        self.timed(KernelKind::Activation, |team| activation::gated(team, f, spans));
    }

    fn gated_backward(
        &self,
        f: Activation,
        gate: Region,
        up: Region,
        dy: Region,
        dgate: Region,
        dup: Region,
    ) {
        assert_same_or_apart(dup, dy);
        assert_apart(&[flat(dgate), flat(dup)], &[flat(gate), flat(up)]);
        assert_apart(&[flat(dgate)], &[flat(dy)]);
        let inputs = [gate, up, dy].map(|region| self.all(region));
        let outputs = [dgate, dup].map(|region| self.all(region));
        let kernel = |team| activation::gated_backward(team, f, inputs, outputs);
        self.timed(KernelKind::Activation, kernel);
    }

    fn attention(&self, shape: &Attention, qkv: Region, y: Region, lse: Region) {
        let [documents, lengths] = masks(shape);
        assert_apart(&[y, lse].map(flat), &[qkv, documents, lengths].map(flat));
        let call = self.attention_call(shape, qkv);
        let per_head = shape.batch * shape.seq * shape.heads;
        let (y, lse) = (self.floats(y, per_head * shape.head_dim), self.floats(lse, per_head));
        self.timed(KernelKind::Attention, |team| attention::forward(team, call, y, lse));
    }

    /// A tile's delta lives on the stack here: the region given for it is checked but left alone.
    fn attention_backward(
        &self,
        shape: &Attention,
        qkv: Region,
        y: Region,
        lse: Region,
        dy: Region,
        dqkv: Region,
        delta: Region,
    ) {
        let [documents, lengths] = masks(shape);
        assert_apart(&[dqkv, delta].map(flat), &[qkv, y, lse, dy, documents, lengths].map(flat));
        let call = self.attention_call(shape, qkv);
        let per_head = shape.batch * shape.seq * shape.heads;
        let values = |region| self.floats(region, per_head * shape.head_dim);
        let dqkv = self.floats(dqkv, call.qkv.len());
        self.floats(delta, per_head);
        let spans = [values(y), self.floats(lse, per_head), values(dy), dqkv];
        self.timed(KernelKind::Attention, |team| attention_backward::backward(team, call, spans));
    }

    fn rotary(&self, rotary: &Rotary, positions: Region, x: Mat) {
        assert_apart(&[x], &[flat(positions)]);
        let (positions, x) = (self.ints(positions, x.rows), self.shaped(x, x.rows, x.cols));
        self.timed(KernelKind::Attention, |team| rotary::rotary(team, rotary, positions, x));
    }

    fn embedding(&self, ids: Region, table: Mat, first: usize, y: Mat, write: Write) {
        assert_apart(&[y], &[flat(ids), table]);
        let (ids, table) = (self.ints(ids, y.rows), self.shaped(table, table.rows, y.cols));
        let (y, add) = (self.shaped(y, y.rows, y.cols), write == Write::Add);
        let kernel = |team| embedding::embedding(team, ids, table, first, y, add);
        self.timed(KernelKind::Embedding, kernel);
    }

    fn embedding_backward(&self, ids: Region, dy: Mat, dtable: Mat, first: usize) {
        assert_apart(&[dtable], &[flat(ids), dy]);
        let (ids, dtable) = (self.ints(ids, dy.rows), self.shaped(dtable, dtable.rows, dy.cols));
        let dy = self.shaped(dy, dy.rows, dy.cols);
        let kernel = |team| embedding::backward(team, ids, dy, dtable, first);
        self.timed(KernelKind::Embedding, kernel);
    }

    fn loss_block(&self, logits: Mat, first: usize, targets: Region, state: Region) {
        assert_apart(&[flat(state)], &[logits, flat(targets)]);
        let logits = self.shaped(logits, logits.rows, logits.cols);
        let (targets, state) =
            (self.ints(targets, logits.rows), self.floats(state, 3 * logits.rows));
        self.timed(KernelKind::Loss, |team| loss::block(team, logits, first, targets, state));
    }

    fn loss_join(&self, other: Region, state: Region) {
        assert_apart(&[flat(state)], &[flat(other)]);
        let (other, state) = (self.floats(other, state.len()), self.all(state));
        self.timed(KernelKind::Loss, |_| loss::join(other, state));
    }

    fn loss_finish(&self, state: Region, targets: Region, lse: Region, loss: Region) {
        assert_apart(&[flat(lse), flat(loss)], &[flat(state), flat(targets)]);
        let t = targets.len;
        let (state, targets) = (self.floats(state, 3 * t), self.ints(targets, t));
        let (lse, loss) = (self.floats(lse, t), self.doubles(loss, 1));
        self.timed(KernelKind::Loss, |_| loss::finish(state, targets, lse, loss));
    }

    fn loss_backward(&self, logits: Mat, first: usize, targets: Region, lse: Region, scale: f32) {
        assert_apart(&[logits], &[flat(targets), flat(lse)]);
        let logits = self.shaped(logits, logits.rows, logits.cols);
        let (targets, lse) = (self.ints(targets, logits.rows), self.floats(lse, logits.rows));
        let kernel = |team| loss::backward(team, logits, first, targets, lse, scale);
        self.timed(KernelKind::Loss, kernel);
    }

    fn adamw(&self, step: &AdamW, w: Region, g: Region, m: Region, v: Region) {
        assert_apart(&[w, m, v].map(flat), &[flat(g)]);
        let spans = [w, g, m, v].map(|region| self.all(region));
        self.timed(KernelKind::Optimizer, |team| optimizer::adamw(team, step, spans));
    }

    fn sgd(&self, step: &Sgd, w: Region, g: Region, m: Region) {
        assert_apart(&[flat(w), flat(m)], &[flat(g)]);
        let momentum = (step.momentum != 0.0).then(|| self.all(m));
        let (w, g) = (self.all(w), self.all(g));
        self.timed(KernelKind::Optimizer, |team| optimizer::sgd(team, step, w, g, momentum));
    }

    fn squared_norm(&self, x: Region, sum: Region) {
        assert_apart(&[flat(sum)], &[flat(x)]);
        let (x, sum) = (self.all(x), self.doubles(sum, 1));
        self.timed(KernelKind::Optimizer, |team| optimizer::squared_norm(team, x, sum));
    }

    fn normal(&self, stream: Stream, first: u64, mean: f32, std: f32, x: Region) {
        let x = self.all(x);
        let kernel = |team| random::normal(team, stream, first, mean, std, x);
        self.timed(KernelKind::Random, kernel);
    }

    fn uniform(&self, stream: Stream, first: u64, low: f32, high: f32, x: Region) {
        let x = self.all(x);
        let kernel = |team| random::uniform(team, stream, first, low, high, x);
        self.timed(KernelKind::Random, kernel);
    }

    fn dropout(&self, stream: Stream, first: u64, p: f32, x: Region, y: Region, write: Write) {
        if write == Write::Add {
            assert_apart(&[flat(y)], &[flat(x)]);
        }
        assert_same_or_apart(y, x);
        assert!(x.len == y.len, "dropout of {x:?} into {y:?}");
        let (spans, add) = ([self.all(x), self.all(y)], write == Write::Add);
        let kernel = |team| random::dropout(team, stream, first, p, spans, add);
        self.timed(KernelKind::Random, kernel);
    }
}
