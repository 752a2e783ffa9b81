//! Backward of attention: the weights are made again tile by tile from the scores and their saved
//! log-sums (FlashAttention, algorithm 4).
//!
//! With P the weights, `dV = P^T dY`, `dP = dY V^T`, `dS = P (dP - delta)` where
//! `delta = rowsum(dY Y)`, `dQ = scale dS K`, `dK = scale dS^T Q`.

use pulp::{Simd, WithSimd};

use super::attention::{Call, Packed, PerQuery, Queries, SIDE, Scores, Shape};
use super::simd::{dot, exp};
use super::team::Team;
use super::tile::{Left, Out, Right, product};
use super::view::Span;

/// `dqkv =`.
///
/// One task per batch row and key/value head: the query heads of a group add to the same keys and
/// values, one after the other, so the order of sums is fixed and needs no atomics.
pub(super) fn backward(team: Team, call: Call, [y, lse, dy, dqkv]: [Span<f32>; 4]) {
    call.assert_supported();
    let Shape { batch, kv_heads, .. } = call.shape;
    team.each_op(batch * kv_heads, |task| {
        let (batch, kv_head) = (task / kv_heads, task % kv_heads);
        team.simd(Group { call, batch, kv_head, y, lse, dy, dqkv });
    });
}

/// One key/value head of one batch row, with the query heads that read it.
#[derive(Clone, Copy)]
struct Group {
    call: Call,
    batch: usize,
    kv_head: usize,
    y: Span<f32>,
    lse: Span<f32>,
    dy: Span<f32>,
    dqkv: Span<f32>,
}

impl WithSimd for Group {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Group { call, batch, kv_head, .. } = self;
        let Shape { seq, heads, kv_heads, .. } = call.shape;
        let group = heads / kv_heads;
        let query_heads = kv_head * group..(kv_head + 1) * group;
        for head in query_heads.clone().chain([heads + kv_head, heads + kv_heads + kv_head]) {
            for token in 0..seq {
                let at = call.at(batch, token, head);
                // SAFETY: these heads are this task's own.
                unsafe { self.dqkv.slice_mut(at..at + call.shape.head_dim) }.fill(0.0);
            }
        }
        for head in query_heads {
            for start in (0..seq).step_by(SIDE) {
                self.tile_of_queries(simd, call.queries(batch, head, start));
            }
        }
    }
}

impl Group {
    #[inline(always)]
    fn tile_of_queries<S: Simd>(self, simd: S, queries: Queries) {
        let call = self.call;
        let Shape { seq, heads, head_dim, scale, .. } = call.shape;
        let Queries { batch, head, start, len } = queries;
        let (y_stride, width) = (heads * head_dim, call.width());
        let y_at = (batch * seq + start) * y_stride + head * head_dim;
        let q_at = call.at(batch, start, head);
        let qkv = call.qkv.ptr().cast_const();
        let (mut packed_q, mut packed_dy) = (Packed::new(), Packed::new());
        let (mut weights, mut slopes) = (Scores::new(), Scores::new());
        let (packed_q, packed_dy) = (packed_q.ptr(), packed_dy.ptr());
        let (weights, slopes) = (weights.ptr(), slopes.ptr());
        let (lse, delta) = self.per_query(queries, y_at, y_stride);
        let (key_head, value_head) = call.key_value_heads(head);
        // SAFETY: all heads and tokens named below are those of the call's shape, which the device
        // checked the regions for; these heads of dqkv are this task's own.
        unsafe {
            let q = qkv.add(q_at);
            let dy = self.dy.ptr().add(y_at).cast_const();
            call.pack(queries, (q, width), scale, packed_q);
            call.pack(queries, (dy, y_stride), 1.0, packed_dy);
            let end = call.keys_end(queries);
            for key in (0..end).step_by(SIDE) {
                let keys = SIDE.min(end - key);
                if call.hidden(queries, key, keys) {
                    continue;
                }
                let (k_at, v_at) = (call.at(batch, key, key_head), call.at(batch, key, value_head));
                call.scores(simd, keys, qkv.add(k_at), packed_q, weights);
                call.mask(queries, key, keys, weights);
                call.scores(simd, keys, qkv.add(v_at), packed_dy, slopes);
                differentiate(weights, slopes, keys, scale, &lse, &delta);
                let add = |at| Out { ptr: self.dqkv.ptr().add(at), rs: width, add: true };
                let by_key = |ptr| Left { ptr, rs: SIDE, cs: 1 };
                let by_query = Left { ptr: slopes, rs: 1, cs: SIDE };
                let (q, dy) = (Right { ptr: q, rs: width }, Right { ptr: dy, rs: y_stride });
                let k = Right { ptr: qkv.add(k_at), rs: width };
                product(simd, (keys, head_dim, len), by_key(weights), dy, add(v_at));
                product(simd, (keys, head_dim, len), by_key(slopes), q, add(k_at));
                product(simd, (len, head_dim, keys), by_query, k, add(q_at));
            }
        }
    }

    /// lse and delta of a tile's queries; beyond its end those of a query that sees nothing.
    #[inline(always)]
    fn per_query(self, queries: Queries, y_at: usize, y_stride: usize) -> (PerQuery, PerQuery) {
        let (mut lse, mut delta) = ([f32::INFINITY; SIDE], [0.0; SIDE]);
        let start = self.call.per_query_at(queries.batch, queries.head) + queries.start;
        for i in 0..queries.len {
            let at = y_at + i * y_stride;
            let range = at..at + self.call.shape.head_dim;
            // SAFETY: none of these is written by this kernel.
            unsafe {
                lse[i] = self.lse.slice(start + i..start + i + 1)[0];
                delta[i] = dot(self.y.slice(range.clone()), self.dy.slice(range));
            }
        }
        (lse, delta)
    }
}

/// From scores and dP to P and `scale dS`, in place.
///
/// # Safety
/// Both must hold `keys` rows of [`SIDE`].
#[inline(always)]
unsafe fn differentiate(
    weights: *mut f32,
    slopes: *mut f32,
    keys: usize,
    scale: f32,
    lse: &PerQuery,
    delta: &PerQuery,
) {
    for j in 0..keys {
        // SAFETY: row j of each; they are apart.
        let (weights, slopes) = unsafe {
            let slopes = &mut *slopes.add(j * SIDE).cast::<PerQuery>();
            (&mut *weights.add(j * SIDE).cast::<PerQuery>(), slopes)
        };
        for i in 0..SIDE {
            let weight = exp(weights[i] - lse[i]);
            weights[i] = weight;
            slopes[i] = weight * (slopes[i] - delta[i]) * scale;
        }
    }
}
