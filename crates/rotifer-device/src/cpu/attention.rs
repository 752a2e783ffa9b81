//! Causal attention in tiles that stay in the cache: no score matrix (Dao et al., "FlashAttention",
//! 2022).
//!
//! Scores are kept transposed, keys by queries. The softmax then runs over the rows of a tile, so
//! all queries of a tile share a vector and nothing is reduced across lanes; and both products read
//! their right-hand side as it lies in memory: only the queries are packed, once per tile of them.
//!
//! b batch rows, s tokens per row, h query heads, k key/value heads, d channels of one head.

use std::mem::MaybeUninit;

use pulp::{Simd, WithSimd};

use super::matmul::{Operand, pack};
use super::simd::exp;
use super::team::Team;
use super::tile::{Left, Out, Right, product};
use super::view::Span;

/// Queries and keys of one tile.
pub(super) const SIDE: usize = 64;
/// Most channels of a head: packed queries live on the stack.
const HEAD_DIM_MAX: usize = 256;

/// Floats on the stack, not set to anything.
#[repr(align(64))]
pub(super) struct Scratch<const N: usize>([MaybeUninit<f32>; N]);

/// Room for one tile of packed queries.
pub(super) type Packed = Scratch<{ SIDE * HEAD_DIM_MAX }>;
/// Room for one tile of scores.
pub(super) type Scores = Scratch<{ SIDE * SIDE }>;

impl<const N: usize> Scratch<N> {
    #[inline(always)]
    pub(super) const fn new() -> Scratch<N> {
        Scratch([const { MaybeUninit::uninit() }; N])
    }

    #[inline(always)]
    pub(super) const fn ptr(&mut self) -> *mut f32 {
        self.0.as_mut_ptr().cast()
    }
}

/// One number per query of a tile.
pub(super) type PerQuery = [f32; SIDE];

/// The sizes of an [`Attention`](crate::Attention), without the handles that stay on one thread.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) batch: usize,
    pub(super) seq: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) scale: f32,
}

/// What forward and backward share: the shape, its masks and the fused projection.
#[derive(Clone, Copy)]
pub(super) struct Call {
    pub(super) shape: Shape,
    pub(super) qkv: Span<f32>,
    pub(super) documents: Option<Span<i32>>,
    pub(super) lengths: Option<Span<i32>>,
}

/// A tile of queries of one head: rows `start .. start + len` of batch row `batch`.
#[derive(Clone, Copy)]
pub(super) struct Queries {
    pub(super) batch: usize,
    pub(super) head: usize,
    pub(super) start: usize,
    pub(super) len: usize,
}

impl Call {
    pub(super) fn assert_supported(&self) {
        let Shape { heads, kv_heads, head_dim, .. } = self.shape;
        assert!(head_dim <= HEAD_DIM_MAX, "attention heads of {head_dim} channels");
        assert!(
            kv_heads > 0 && heads % kv_heads == 0,
            "{heads} query heads do not share {kv_heads} key/value heads evenly"
        );
    }

    /// Columns of the fused projection.
    pub(super) const fn width(&self) -> usize {
        (self.shape.heads + 2 * self.shape.kv_heads) * self.shape.head_dim
    }

    /// Element of the fused projection where a head's vector begins: query heads come first, then
    /// key heads, then value heads.
    #[inline(always)]
    pub(super) const fn at(&self, batch: usize, token: usize, head: usize) -> usize {
        (batch * self.shape.seq + token) * self.width() + head * self.shape.head_dim
    }

    /// Head number, as [`at`](Call::at) counts, of the keys and values that a query head reads.
    #[inline(always)]
    pub(super) const fn key_value_heads(&self, head: usize) -> (usize, usize) {
        let Shape { heads, kv_heads, .. } = self.shape;
        let key = heads + head / (heads / kv_heads);
        (key, key + kv_heads)
    }

    /// Element of lse where a head's tokens begin.
    #[inline(always)]
    pub(super) const fn per_query_at(&self, batch: usize, head: usize) -> usize {
        (batch * self.shape.heads + head) * self.shape.seq
    }

    /// The tile of queries that begins at token `start`.
    #[inline(always)]
    pub(super) fn queries(&self, batch: usize, head: usize, start: usize) -> Queries {
        Queries { batch, head, start, len: SIDE.min(self.shape.seq - start) }
    }

    /// One past the last key that any query of the tile may see.
    #[inline(always)]
    pub(super) fn keys_end(&self, queries: Queries) -> usize {
        let end = queries.start + queries.len;
        match self.lengths {
            None => end,
            Some(lengths) => {
                // SAFETY: kernels do not write masks.
                let length = unsafe { lengths.slice(queries.batch..queries.batch + 1)[0] };
                end.min(usize::try_from(length).unwrap_or(0))
            }
        }
    }

    #[inline(always)]
    fn documents_of(&self, batch: usize, start: usize, len: usize) -> Option<&[i32]> {
        let start = batch * self.shape.seq + start;
        // SAFETY: kernels do not write masks.
        self.documents.map(|documents| unsafe { documents.slice(start..start + len) })
    }

    /// Whether documents keep all keys of a tile from all its queries. Looks at ranges of numbers
    /// only, which is exact for the usual ascending ones.
    #[inline(always)]
    pub(super) fn hidden(&self, queries: Queries, key: usize, num_keys: usize) -> bool {
        let range =
            |d: &[i32]| d.iter().fold((i32::MAX, i32::MIN), |r, &d| (r.0.min(d), r.1.max(d)));
        let of_queries = self.documents_of(queries.batch, queries.start, queries.len).map(range);
        let of_keys = self.documents_of(queries.batch, key, num_keys).map(range);
        match (of_queries, of_keys) {
            (Some(q), Some(k)) => q.1 < k.0 || k.1 < q.0,
            _ => false,
        }
    }

    /// `scores[j, i] = -inf` where query i may not see key j.
    ///
    /// # Safety
    /// `scores` must hold `num_keys` rows of [`SIDE`].
    #[inline(always)]
    pub(super) unsafe fn mask(&self, q: Queries, key: usize, num_keys: usize, scores: *mut f32) {
        let ids = self
            .documents_of(q.batch, q.start, q.len)
            .zip(self.documents_of(q.batch, key, num_keys));
        if ids.is_none() && key + num_keys <= q.start + 1 {
            return;
        }
        for j in 0..num_keys {
            // SAFETY: row j of the scores.
            let row = unsafe { &mut *scores.add(j * SIDE).cast::<PerQuery>() };
            // A query sees the keys up to its own position.
            row[..(key + j).saturating_sub(q.start).min(SIDE)].fill(f32::NEG_INFINITY);
            if let Some((of_queries, of_keys)) = ids {
                for (score, document) in row.iter_mut().zip(of_queries) {
                    *score = if *document == of_keys[j] { *score } else { f32::NEG_INFINITY };
                }
            }
        }
    }

    /// Packs vectors of a tile's queries, times `factor`: `to[c * SIDE + i]` is channel c of query
    /// i, 0 for queries beyond the tile's end.
    ///
    /// # Safety
    /// `from` must be good for the tile's rows, `stride` elements apart.
    #[inline(always)]
    pub(super) unsafe fn pack(
        &self,
        queries: Queries,
        (from, stride): (*const f32, usize),
        factor: f32,
        to: *mut f32,
    ) {
        let len = self.shape.head_dim * SIDE;
        // SAFETY: head_dim is at most HEAD_DIM_MAX, and the rest as the caller promises.
        unsafe {
            if queries.len < SIDE {
                to.write_bytes(0, len);
            }
            let from = Operand { ptr: from, rs: stride, cs: 1 };
            pack(from, queries.len, self.shape.head_dim, to, SIDE);
            if factor != 1.0 {
                for i in 0..len {
                    *to.add(i) *= factor;
                }
            }
        }
    }

    /// `scores[j, i] = keys[j] . packed queries[i]`.
    ///
    /// # Safety
    /// `keys` must be good for `num_keys` rows of the fused projection.
    #[inline(always)]
    pub(super) unsafe fn scores<S: Simd>(
        &self,
        simd: S,
        num_keys: usize,
        keys: *const f32,
        packed: *const f32,
        scores: *mut f32,
    ) {
        let keys = Left { ptr: keys, rs: self.width(), cs: 1 };
        let packed = Right { ptr: packed, rs: SIDE };
        let scores = Out { ptr: scores, rs: SIDE, add: false };
        // SAFETY: as the caller promises; the scores are on the stack.
        unsafe { product(simd, (num_keys, SIDE, self.shape.head_dim), keys, packed, scores) };
    }
}

/// `y = softmax(scale q k^T) v` and the log of each softmax's sum: `+inf` for a query that sees no
/// key, so that backward's `exp(score - lse)` is 0.
pub(super) fn forward(team: Team, call: Call, y: Span<f32>, lse: Span<f32>) {
    call.assert_supported();
    let Shape { batch, seq, heads, .. } = call.shape;
    let tiles = seq.div_ceil(SIDE);
    team.each_op(batch * heads * tiles, |task| {
        let (batch_head, tile) = (task / tiles, task % tiles);
        let queries = call.queries(batch_head / heads, batch_head % heads, tile * SIDE);
        team.simd(ForwardTile { call, queries, y, lse });
    });
}

struct ForwardTile {
    call: Call,
    queries: Queries,
    y: Span<f32>,
    lse: Span<f32>,
}

impl WithSimd for ForwardTile {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let ForwardTile { call, queries, .. } = self;
        let Shape { seq, heads, head_dim, scale, .. } = call.shape;
        let Queries { batch, head, start, len } = queries;
        let (key_head, value_head) = call.key_value_heads(head);
        let (y_stride, width) = (heads * head_dim, call.width());
        let y = self.y.ptr().wrapping_add((batch * seq + start) * y_stride + head * head_dim);
        let qkv = self.call.qkv.ptr().cast_const();
        let (mut packed, mut scores) = (Packed::new(), Scores::new());
        let (packed, scores) = (packed.ptr(), scores.ptr());
        let mut softmax = Softmax { top: [f32::NEG_INFINITY; SIDE], sum: [0.0; SIDE] };
        let mut first = true;
        // SAFETY: all heads and tokens named below are those of the call's shape, which the device
        // checked the regions for; this task alone writes this head's rows of y and lse.
        unsafe {
            let from = qkv.wrapping_add(call.at(batch, start, head));
            call.pack(queries, (from, width), scale, packed);
            let end = call.keys_end(queries);
            for key in (0..end).step_by(SIDE) {
                let num_keys = SIDE.min(end - key);
                if call.hidden(queries, key, num_keys) {
                    continue;
                }
                let keys = qkv.wrapping_add(call.at(batch, key, key_head));
                call.scores(simd, num_keys, keys, packed, scores);
                call.mask(queries, key, num_keys, scores);
                let factors = softmax.take(scores, num_keys);
                if !first {
                    scale_rows(y, y_stride, len, head_dim, &factors);
                }
                let weights = Left { ptr: scores, rs: 1, cs: SIDE };
                let values = qkv.wrapping_add(call.at(batch, key, value_head));
                let values = Right { ptr: values, rs: width };
                let out = Out { ptr: y, rs: y_stride, add: !first };
                product(simd, (len, head_dim, num_keys), weights, values, out);
                first = false;
            }
            let at = call.per_query_at(batch, head) + start;
            softmax.finish(self.lse.slice_mut(at..at + len));
            if first {
                (0..len).for_each(|i| y.add(i * y_stride).write_bytes(0, head_dim));
            }
            scale_rows(y, y_stride, len, head_dim, &softmax.sum);
        }
    }
}

/// The online softmax of a tile of queries.
struct Softmax {
    top: PerQuery,
    sum: PerQuery,
}

impl Softmax {
    /// Takes a tile of scores in and turns it to weights relative to the new maxima. Returns what
    /// everything that was summed before must be multiplied by.
    ///
    /// # Safety
    /// `scores` must hold `num_keys` rows of [`SIDE`].
    #[inline(always)]
    unsafe fn take(&mut self, scores: *mut f32, num_keys: usize) -> PerQuery {
        let mut top = self.top;
        for j in 0..num_keys {
            // SAFETY: row j of the scores.
            let row = unsafe { &*scores.add(j * SIDE).cast::<PerQuery>() };
            for i in 0..SIDE {
                top[i] = if row[i] > top[i] { row[i] } else { top[i] };
            }
        }
        // A query that has seen no key yet has no maximum to subtract: its scores are all -inf.
        let mut base = top;
        for base in &mut base {
            *base = if *base == f32::NEG_INFINITY { 0.0 } else { *base };
        }
        let mut sum = [0.0; SIDE];
        for j in 0..num_keys {
            // SAFETY: row j of the scores.
            let row = unsafe { &mut *scores.add(j * SIDE).cast::<PerQuery>() };
            for i in 0..SIDE {
                let weight = exp(row[i] - base[i]);
                row[i] = weight;
                sum[i] += weight;
            }
        }
        let mut factors = [0.0; SIDE];
        for i in 0..SIDE {
            factors[i] = exp(self.top[i] - base[i]);
            self.sum[i] = self.sum[i].mul_add(factors[i], sum[i]);
        }
        self.top = top;
        factors
    }

    /// Writes the log of each sum, and leaves in `sum` what y must be multiplied by.
    #[inline(always)]
    fn finish(&mut self, lse: &mut [f32]) {
        for (i, lse) in lse.iter_mut().enumerate() {
            let seen = self.sum[i] > 0.0;
            *lse = if seen { self.top[i] + self.sum[i].ln() } else { f32::INFINITY };
            self.sum[i] = if seen { 1.0 / self.sum[i] } else { 0.0 };
        }
    }
}

/// Multiplies each row of a tile by a factor of its own.
///
/// # Safety
/// `y` must be good for `rows` rows of `cols` elements, and be this task's own.
#[inline(always)]
unsafe fn scale_rows(y: *mut f32, stride: usize, rows: usize, cols: usize, factors: &PerQuery) {
    for (i, &factor) in factors[..rows].iter().enumerate() {
        if factor != 1.0 {
            // SAFETY: row i.
            let row = unsafe { std::slice::from_raw_parts_mut(y.add(i * stride), cols) };
            row.iter_mut().for_each(
                #[inline(always)]
                |y| *y *= factor,
            );
        }
    }
}
