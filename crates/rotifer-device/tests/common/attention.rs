//! Attention and rotary positions.

use proptest::prelude::*;
use rotifer_device::reference::{self, Masks};
use rotifer_device::{Attention, Device, Region, Rotary};

use super::numbers::Numbers;
use super::*;

/// Sizes of one call, and how its masks are drawn.
#[derive(Clone, Copy, Debug)]
struct Case {
    batch: usize,
    seq: usize,
    kv_heads: usize,
    /// Query heads per key head.
    group: usize,
    head_dim: usize,
    /// Scores are this much larger than usual: a peaked softmax.
    sharpness: f32,
    documents: Documents,
    lengths: bool,
    seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Documents {
    One,
    /// Samples packed one behind the other.
    Packed,
    /// Any order: the contract does not ask that a document's tokens be neighbours.
    Mixed,
}

fn cases() -> impl Strategy<Value = Case> {
    let dims = one_of(&[7, 16, 40, 64, 96, 128, 256]);
    let seqs = prop_oneof![1 => Just(0), 1 => Just(1), 8 => 2..=70_usize, 2 => 100..=200_usize];
    let heads = (1..=2_usize, 1..=3_usize);
    let documents = one_of(&[Documents::One, Documents::Packed, Documents::Mixed]);
    let masks = (documents, any::<bool>());
    let sizes = (1..=3_usize, seqs, heads, dims, one_of(&[1.0, 6.0]));
    (sizes, masks, any::<u64>()).prop_map(|(sizes, (documents, lengths), seed)| {
        let (batch, seq, (kv_heads, group), head_dim, sharpness) = sizes;
        // Long sequences of wide heads would take the whole time and reach no other code.
        let seq = seq.min(12_000 / head_dim);
        Case { batch, seq, kv_heads, group, head_dim, sharpness, documents, lengths, seed }
    })
}

impl Case {
    fn shape(&self) -> Attention {
        Attention {
            batch: self.batch,
            seq: self.seq,
            heads: self.kv_heads * self.group,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale: self.sharpness / (self.head_dim as f32).sqrt(),
            documents: None,
            lengths: None,
        }
    }

    fn documents(&self, numbers: &mut Numbers) -> Option<Vec<i32>> {
        let mut number = 7;
        let next = |_| match self.documents {
            Documents::Mixed => numbers.below(3) as i32,
            _ => {
                number += i32::from(numbers.below(12) == 0);
                number
            }
        };
        let documents = (0..self.batch * self.seq).map(next).collect();
        (self.documents != Documents::One).then_some(documents)
    }

    /// The first row has no tokens at all.
    fn lengths(&self, numbers: &mut Numbers) -> Option<Vec<i32>> {
        let length = |row| if row == 0 { 0 } else { numbers.below(self.seq + 1) as i32 };
        self.lengths.then(|| (0..self.batch).map(length).collect())
    }
}

pub fn check_attention(devices: &[&dyn Device]) {
    for_all(devices, cases(), |field, case| {
        let (mut shape, numbers) = (case.shape(), &mut Numbers::new(case.seed));
        let tokens = shape.batch * shape.seq;
        let documents = case.documents(numbers);
        let lengths = case.lengths(numbers);
        let masks = Masks { documents: documents.as_deref(), lengths: lengths.as_deref() };
        shape.documents = documents.as_ref().map(|documents| field.ints(documents));
        shape.lengths = lengths.as_ref().map(|lengths| field.ints(lengths));
        let qkv = numbers.normals(tokens * shape.qkv_width());
        let dy = numbers.normals(tokens * shape.heads * shape.head_dim);
        let (qkv_at, dy_at) = (field.floats(&qkv), field.floats(&dy));
        let room = |n: usize| field.floats(&vec![f32::NAN; n]);
        let [y_at, lse_at, delta_at] =
            [dy.len(), tokens * shape.heads, tokens * shape.heads].map(room);
        let dqkv_at = room(qkv.len());
        let outputs = [y_at, lse_at].map(flat);
        field.call(&outputs, |device| device.attention(&shape, qkv_at, y_at, lse_at));
        field.call(&[dqkv_at, delta_at].map(flat), |device| {
            device.attention_backward(&shape, qkv_at, y_at, lse_at, dy_at, dqkv_at, delta_at);
        });
        compare(field, &shape, masks, [&wide(&qkv), &wide(&dy)], [y_at, lse_at, dqkv_at]);
    });
}

fn compare(
    field: &Field<'_>,
    shape: &Attention,
    masks: Masks<'_>,
    [qkv, dy]: [&[f64]; 2],
    [y_at, lse_at, dqkv_at]: [Region; 3],
) {
    let tolerances = Tolerances::of(shape, masks, qkv, dy);
    let (y, mut lse) = reference::attention(shape, masks, qkv);
    assert_close("y", &field.values(y_at), &y, |i| tolerances.y[i]);
    let mut got = field.values(lse_at);
    // What a query that sees nothing gets is between forward and backward.
    for (got, want) in got.iter_mut().zip(&mut lse).filter(|(_, want)| want.is_infinite()) {
        (*got, *want) = (0.0, 0.0);
    }
    assert_close("lse", &got, &lse, |i| tolerances.lse[i]);
    let dqkv = reference::attention_backward(shape, masks, qkv, dy);
    assert_close("dqkv", &field.values(dqkv_at), &dqkv, |i| tolerances.dqkv[i]);
}

/// How far each element may be off: the equations of the twin over magnitudes, times the relative
/// error of what they are made of.
///
/// The error of a sum of n terms grows like the root of n, three times which it hardly ever exceeds
/// (Higham, Mary 2019); its worst case, n, would hide real faults here. `exp(score - lse)` turns
/// the absolute error of both into a relative one.
struct Tolerances {
    y: Vec<f64>,
    lse: Vec<f64>,
    dqkv: Vec<f64>,
}

impl Tolerances {
    fn of(shape: &Attention, masks: Masks<'_>, qkv: &[f64], dy: &[f64]) -> Tolerances {
        let queries = shape.batch * shape.heads * shape.seq;
        let (y, lse, dqkv) =
            (vec![0.0; dy.len()], Vec::with_capacity(queries), vec![0.0; qkv.len()]);
        let mut tolerances = Tolerances { y, lse, dqkv };
        for row in 0..shape.batch {
            for head in 0..shape.heads {
                for i in 0..shape.seq {
                    tolerances.take_query(shape, masks, [qkv, dy], [row, head, i]);
                }
            }
        }
        tolerances
    }

    fn take_query(
        &mut self,
        shape: &Attention,
        masks: Masks<'_>,
        [qkv, dy]: [&[f64]; 2],
        [row, head, i]: [usize; 3],
    ) {
        let (d, scale, root) =
            (shape.head_dim, f64::from(shape.scale), |n: usize| (n as f64).sqrt());
        let [q, k, v] = reference::attention_columns(shape, head);
        let at = |j: usize| (row * shape.seq + j) * shape.qkv_width();
        let part = |j: usize, column: usize| &qkv[at(j) + column..][..d];
        let dy_at = ((row * shape.seq + i) * shape.heads + head) * d;
        let dy_i = &dy[dy_at..][..d];
        let size =
            |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum() };
        let (p, lse) = reference::attention_weights(shape, masks, qkv, [row, head, i]);
        let visible = |j: &usize| masks.visible(row, shape.seq, i, *j);
        let score = (0..=i)
            .filter(visible)
            .map(|j| scale * size(part(i, q), part(j, k)))
            .fold(0.0, f64::max);
        let weight = UNIT * ((6.0 * root(d) + 8.0) * score + 3.0 * root(i + 1) + 24.0);
        self.lse.push(weight + 4.0 * UNIT * lse.abs());
        let per_dot = UNIT * (6.0 * root(d) + 24.0);
        let per_sum = 3.0 * UNIT * root(shape.seq * shape.heads / shape.kv_heads);
        let share = 3.0 * weight + per_dot + per_sum;
        let delta: f64 = (0..=i).map(|j| p[j] * size(dy_i, part(j, v))).sum();
        for (j, p) in p.iter().enumerate() {
            let ds = scale * p * (size(dy_i, part(j, v)) + delta) * share;
            for (l, dy) in dy_i.iter().enumerate() {
                self.y[dy_at + l] += 2.0 * weight * p * part(j, v)[l].abs();
                self.dqkv[at(i) + q + l] += ds * part(j, k)[l].abs();
                self.dqkv[at(j) + k + l] += ds * part(i, q)[l].abs();
                self.dqkv[at(j) + v + l] += share * p * dy.abs();
            }
        }
    }
}

pub fn check_rotary(devices: &[&dyn Device]) {
    let dims = one_of(&[2, 16, 40, 64, 128, 256]);
    let sizes = (heights(), 0..=3_usize, dims, 0..=20_usize, layouts());
    let how = (one_of(&[10_000.0, 500_000.0]), any::<bool>());
    for_all(devices, (sizes, how, any::<u64>()), |field, (sizes, (theta, inverse), seed)| {
        let (t, heads, head_dim, rest, layout) = *sizes;
        let width = heads * head_dim + rest;
        let numbers = &mut Numbers::new(*seed);
        let x = numbers.normals(t * width);
        // Far enough out that an angle in f32 would be wrong by 1e-2.
        let positions: Vec<i32> = (0..t).map(|_| numbers.below(200_000) as i32).collect();
        let (x_at, positions_at) = (field.matrix(&x, [t, width], layout), field.ints(&positions));
        let turn = Rotary { heads, head_dim, theta: *theta, inverse: *inverse };
        let turned = x_at.columns(0..heads * head_dim);
        field.call(&[turned], |device| device.rotary(&turn, positions_at, x_at));
        if width > 0 {
            let x = wide(&x);
            let want = reference::rotary(&turn, &positions, &x, width);
            // Sine and cosine are off by 2 u, and the pair is one product and one fused step.
            let half = head_dim / 2;
            assert_close("x", &field.matrix_values(x_at), &want, |i| {
                let column = i % width;
                if column >= heads * head_dim {
                    return 0.0;
                }
                let pair = if column % head_dim < half { i + half } else { i - half };
                8.0 * UNIT * (x[i].abs() + x[pair].abs())
            });
        }
        let back = Rotary { inverse: !inverse, ..turn };
        field.call(&[turned], |device| device.rotary(&back, positions_at, x_at));
        let there_and_back = 64.0 * UNIT;
        assert_close("back", &field.matrix_values(x_at), &wide(&x), |_| there_and_back);
    });
}
