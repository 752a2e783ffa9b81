//! Naive `f64` twins of the kernels: the oracle of every kernel test.
//!
//! Written to be compared with the papers by eye, never to be fast. Shapes as in [`Device`]; all
//! matrices are row-major without gaps, and a function is given the widths it cannot derive.
//! Results are returned, so whether a kernel sets or adds is its test's business; only what
//! scatters ([`embedding`], [`embedding_backward`]) or updates ([`loss_block`], [`loss_join`],
//! [`adamw`], [`sgd`]) works in place. There is no twin of the random generator: its tests check
//! what it promises.
//!
//! All functions panic if a slice is too short for the shapes given.
//!
//! [`Device`]: crate::Device

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use crate::{Activation, AdamW, Attention, Norm, Rotary, Sgd, Write};

/// `c[i, j] = sum over l of a[i, l] b[l, j]`. a: `[m, k]`, b: `[k, n]`, c: `[m, n]`.
#[must_use]
pub fn matmul(a: &[f64], b: &[f64], [m, k, n]: [usize; 3]) -> Vec<f64> {
    let mut c = vec![0.0; m * n];
    for i in 0..m {
        for l in 0..k {
            for j in 0..n {
                c[i * n + j] += a[i * k + l] * b[l * n + j];
            }
        }
    }
    c
}

/// `y[j, i] = x[i, j]`. x: `[rows, cols]`.
#[must_use]
pub fn transpose(x: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    let mut y = vec![0.0; rows * cols];
    for i in 0..rows {
        for j in 0..cols {
            y[j * rows + i] = x[i * cols + j];
        }
    }
    y
}

/// `y[i, :] = x[i, :] + b`. x, y: `[t, o]`, b: `[o]`.
#[must_use]
pub fn bias(x: &[f64], b: &[f64]) -> Vec<f64> {
    x.iter().enumerate().map(|(i, x)| x + b[i % b.len()]).collect()
}

/// `db[j] = sum over i of dy[i, j]`. dy: `[t, o]`, db: `[o]`.
#[must_use]
pub fn bias_backward(dy: &[f64], o: usize) -> Vec<f64> {
    let mut db = vec![0.0; o];
    for (i, g) in dy.iter().enumerate() {
        db[i % o] += g;
    }
    db
}

/// `(mean, 1 / sqrt(mean((x - mean)^2) + eps))` of one token (Ba, Kiros, Hinton 2016, eq. 3); with
/// the mean taken as 0 for RMS (Zhang, Sennrich 2019, eq. 4). eps stands where PyTorch puts it.
#[must_use]
pub fn norm_statistics(norm: Norm, x: &[f64]) -> (f64, f64) {
    let n = x.len() as f64;
    let (mean, eps) = match norm {
        Norm::Layer { eps } => (x.iter().sum::<f64>() / n, eps),
        Norm::Rms { eps } => (0.0, eps),
    };
    let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
    (mean, 1.0 / (variance + f64::from(eps)).sqrt())
}

/// `y = (x - mean) / std * w + b`, and `stats = (mean, 1/std)` of each token.
/// x, y: `[t, c]`, w: `[c]`, b: `[c]` if there is one, stats: `[t, 2]`.
#[must_use]
pub fn norm(norm: Norm, x: &[f64], w: &[f64], b: Option<&[f64]>) -> (Vec<f64>, Vec<f64>) {
    let (mut y, mut stats) = (Vec::new(), Vec::new());
    for row in x.chunks_exact(w.len()) {
        let (mean, scale) = norm_statistics(norm, row);
        stats.extend([mean, scale]);
        for (j, x) in row.iter().enumerate() {
            y.push((x - mean) * scale * w[j] + b.map_or(0.0, |b| b[j]));
        }
    }
    (y, stats)
}

/// With `g = dy w` and `h = (x - mean) / std`: `dx = (g - mean(g) - h mean(g h)) / std`, without
/// `mean(g)` for RMS, whose forward subtracts no mean; `dw = sum of dy h`, `db = sum of dy` over
/// tokens. x, dy, dx: `[t, c]`, w, dw, db: `[c]`. Returns (dx, dw, db).
#[must_use]
pub fn norm_backward(norm: Norm, x: &[f64], w: &[f64], dy: &[f64]) -> [Vec<f64>; 3] {
    let c = w.len();
    let (mut dx, mut dw, mut db) = (Vec::new(), vec![0.0; c], vec![0.0; c]);
    for (x, dy) in x.chunks_exact(c).zip(dy.chunks_exact(c)) {
        let (mean, scale) = norm_statistics(norm, x);
        let h: Vec<f64> = x.iter().map(|x| (x - mean) * scale).collect();
        let g: Vec<f64> = dy.iter().zip(w).map(|(dy, w)| dy * w).collect();
        let mean_g = match norm {
            Norm::Layer { .. } => g.iter().sum::<f64>() / c as f64,
            Norm::Rms { .. } => 0.0,
        };
        let mean_gh = dot(&g, &h) / c as f64;
        for j in 0..c {
            dx.push((g[j] - mean_g - h[j] * mean_gh) * scale);
            dw[j] += dy[j] * h[j];
            db[j] += dy[j];
        }
    }
    [dx, dw, db]
}

/// `f(x)`. GELU `x P(X <= x)` and its tanh form: Hendrycks, Gimpel 2016; SiLU `x sigmoid(x)`:
/// Elfwing, Uchibe, Doya 2017.
#[must_use]
pub fn activation(f: Activation, x: f64) -> f64 {
    match f {
        Activation::GeluTanh => 0.5 * x * (1.0 + gelu_argument(x).tanh()),
        Activation::GeluErf => x * normal_cdf(x),
        Activation::Silu => x * sigmoid(x),
    }
}

/// `f'(x)`, by the product rule on [`activation`].
#[must_use]
pub fn activation_slope(f: Activation, x: f64) -> f64 {
    match f {
        Activation::GeluTanh => {
            let tanh = gelu_argument(x).tanh();
            let argument_slope = (2.0 / PI).sqrt() * (1.0 + 3.0 * 0.044_715 * x * x);
            0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * argument_slope
        }
        Activation::GeluErf => normal_cdf(x) + x * (-0.5 * x * x).exp() / (2.0 * PI).sqrt(),
        Activation::Silu => sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x))),
    }
}

/// `f(gate) up` (Shazeer 2020).
#[must_use]
pub fn gated(f: Activation, gate: f64, up: f64) -> f64 {
    activation(f, gate) * up
}

/// `(dgate, dup) = (f'(gate) up dy, f(gate) dy)`.
#[must_use]
pub fn gated_backward(f: Activation, gate: f64, up: f64, dy: f64) -> (f64, f64) {
    (activation_slope(f, gate) * up * dy, activation(f, gate) * dy)
}

fn gelu_argument(x: f64) -> f64 {
    (2.0 / PI).sqrt() * (x + 0.044_715 * x * x * x)
}

fn normal_cdf(x: f64) -> f64 {
    0.5 * libm::erfc(-x * FRAC_1_SQRT_2)
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The masks of an [`Attention`] call, as the host sees them; the regions in the shape are ignored.
#[derive(Clone, Copy, Debug, Default)]
pub struct Masks<'a> {
    /// Document number of each token: `[b*s]`.
    pub documents: Option<&'a [i32]>,
    /// Number of real tokens of each row: `[b]`.
    pub lengths: Option<&'a [i32]>,
}

impl Masks<'_> {
    /// Whether query `i` of batch row `row` sees key `j`: not later, of its document, and real.
    #[must_use]
    pub fn visible(&self, row: usize, seq: usize, i: usize, j: usize) -> bool {
        j <= i
            && self.documents.is_none_or(|d| d[row * seq + i] == d[row * seq + j])
            && self.lengths.is_none_or(|l| i64::try_from(j).is_ok_and(|j| j < i64::from(l[row])))
    }
}

/// The columns of query head `head` in each of q, k and v: where they start in a row of qkv.
#[must_use]
pub fn attention_columns(shape: &Attention, head: usize) -> [usize; 3] {
    let kv_head = head / (shape.heads / shape.kv_heads);
    [head, shape.heads + kv_head, shape.heads + shape.kv_heads + kv_head]
        .map(|h| h * shape.head_dim)
}

/// Softmax weights of one query over the keys `0..=i`, and the log of its sum (Vaswani et al. 2017,
/// eq. 1): `p_j = exp(score_j - lse)`, `score_j = scale q_i . k_j`. Zeros and -inf if it sees none.
#[must_use]
pub fn attention_weights(
    shape: &Attention,
    masks: Masks<'_>,
    qkv: &[f64],
    [row, head, i]: [usize; 3],
) -> (Vec<f64>, f64) {
    let (width, d) = (shape.qkv_width(), shape.head_dim);
    let [q, k, _] = attention_columns(shape, head);
    let part = |token: usize, column: usize| {
        let start = (row * shape.seq + token) * width + column;
        &qkv[start..start + d]
    };
    let score = |j: usize| match masks.visible(row, shape.seq, i, j) {
        true => f64::from(shape.scale) * dot(part(i, q), part(j, k)),
        false => f64::NEG_INFINITY,
    };
    let scores: Vec<f64> = (0..=i).map(score).collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if top == f64::NEG_INFINITY {
        return (vec![0.0; i + 1], top);
    }
    let lse = top + scores.iter().map(|score| (score - top).exp()).sum::<f64>().ln();
    (scores.iter().map(|score| (score - lse).exp()).collect(), lse)
}

/// `y_i = sum over j of p_ij v_j` per query head, and lse.
/// qkv: `[b*s, (h + 2k)*d]`, y: `[b*s, h*d]`, lse: `[b, h, s]`.
#[must_use]
pub fn attention(shape: &Attention, masks: Masks<'_>, qkv: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let &Attention { batch, seq, heads, head_dim: d, .. } = shape;
    let (mut y, mut lse) = (vec![0.0; batch * seq * heads * d], Vec::new());
    for row in 0..batch {
        for head in 0..heads {
            let [_, _, v] = attention_columns(shape, head);
            for i in 0..seq {
                let (p, log_sum) = attention_weights(shape, masks, qkv, [row, head, i]);
                lse.push(log_sum);
                let y_i = ((row * seq + i) * heads + head) * d;
                for (j, p) in p.iter().enumerate() {
                    let v_j = (row * seq + j) * shape.qkv_width() + v;
                    for l in 0..d {
                        y[y_i + l] += p * qkv[v_j + l];
                    }
                }
            }
        }
    }
    (y, lse)
}

/// With `dp_ij = dy_i . v_j` and `ds_ij = p_ij (dp_ij - sum over l of p_il dp_il)`:
/// `dq_i = scale sum_j ds_ij k_j`, `dk_j = scale sum_i ds_ij q_i`, `dv_j = sum_i p_ij dy_i`, the
/// last two over all query heads of a key head (Dao et al. 2022, appendix B.2). dy: `[b*s, h*d]`.
#[must_use]
pub fn attention_backward(
    shape: &Attention,
    masks: Masks<'_>,
    qkv: &[f64],
    dy: &[f64],
) -> Vec<f64> {
    let &Attention { batch, seq, heads, head_dim: d, .. } = shape;
    let (width, scale) = (shape.qkv_width(), f64::from(shape.scale));
    let mut dqkv = vec![0.0; qkv.len()];
    for row in 0..batch {
        for head in 0..heads {
            let [q, k, v] = attention_columns(shape, head);
            for i in 0..seq {
                let (p, _) = attention_weights(shape, masks, qkv, [row, head, i]);
                let at_i = (row * seq + i) * width;
                let dy_i = &dy[((row * seq + i) * heads + head) * d..][..d];
                let at = |j: usize| (row * seq + j) * width;
                let dp: Vec<f64> = (0..=i).map(|j| dot(dy_i, &qkv[at(j) + v..][..d])).collect();
                let delta = dot(&p, &dp);
                for j in 0..=i {
                    let ds = scale * p[j] * (dp[j] - delta);
                    for l in 0..d {
                        dqkv[at_i + q + l] += ds * qkv[at(j) + k + l];
                        dqkv[at(j) + k + l] += ds * qkv[at_i + q + l];
                        dqkv[at(j) + v + l] += p[j] * dy_i[l];
                    }
                }
            }
        }
    }
    dqkv
}

/// `(a, b) = (a cos - b sin, b cos + a sin)` for channels a = i and b = i + d/2 of each head, by
/// the angle `position theta^(-2i/d)` (Su et al. 2021, eq. 34, in the half-split order of NeoX).
/// x: `[t, width]`, positions: `[t]`.
#[must_use]
pub fn rotary(rotary: &Rotary, positions: &[i32], x: &[f64], width: usize) -> Vec<f64> {
    let (d, half) = (rotary.head_dim, rotary.head_dim / 2);
    let sign = if rotary.inverse { -1.0 } else { 1.0 };
    let mut y = x.to_vec();
    for (row, position) in y.chunks_exact_mut(width).zip(positions) {
        for head in row[..rotary.heads * d].chunks_exact_mut(d) {
            for i in 0..half {
                let frequency = f64::from(rotary.theta).powf(-2.0 * i as f64 / d as f64);
                let (sin, cos) = (sign * f64::from(*position) * frequency).sin_cos();
                let (a, b) = (head[i], head[i + half]);
                (head[i], head[i + half]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
    }
    y
}

/// Row of a table of `rows` rows that holds an id, if the ids from `first` on are the table's.
fn row_of(id: i32, first: usize, rows: usize) -> Option<usize> {
    usize::try_from(id).ok()?.checked_sub(first).filter(|row| *row < rows)
}

/// `y[i, :] = table[ids[i] - first, :]` or `+=`, where the table has that row. ids: `[t]`,
/// table: `[v, c]`, y: `[t, c]`.
pub fn embedding(ids: &[i32], table: &[f64], first: usize, c: usize, y: &mut [f64], write: Write) {
    for (i, id) in ids.iter().enumerate() {
        let Some(row) = row_of(*id, first, table.len() / c) else { continue };
        for j in 0..c {
            let old = if write == Write::Add { y[i * c + j] } else { 0.0 };
            y[i * c + j] = old + table[row * c + j];
        }
    }
}

/// `dtable[ids[i] - first, :] += dy[i, :]`, where the table has that row. ids: `[t]`, dy: `[t, c]`,
/// dtable: `[v, c]`.
pub fn embedding_backward(ids: &[i32], dy: &[f64], first: usize, c: usize, dtable: &mut [f64]) {
    for (i, id) in ids.iter().enumerate() {
        let Some(row) = row_of(*id, first, dtable.len() / c) else { continue };
        for j in 0..c {
            dtable[row * c + j] += dy[i * c + j];
        }
    }
}

/// `m' = max(m, max of logits)`, `sum' = sum exp(m - m') + sum over j of exp(logit_j - m')`, and
/// the target's logit if it is in this block (Milakov, Gimelshein 2018, algorithm 3).
/// logits: `[t, v_k]`, targets: `[t]`, state: `[t, 3]`, to begin with (-inf, 0, 0).
pub fn loss_block(logits: &[f64], first: usize, targets: &[i32], state: &mut [f64]) {
    let classes = logits.len() / targets.len().max(1);
    for (i, target) in targets.iter().enumerate() {
        let (row, state) = (&logits[i * classes..][..classes], &mut state[3 * i..][..3]);
        let top = row.iter().copied().fold(state[0], f64::max);
        if top > f64::NEG_INFINITY {
            state[1] *= (state[0] - top).exp();
            state[1] += row.iter().map(|logit| (logit - top).exp()).sum::<f64>();
        }
        state[0] = top;
        if let Some(at) = row_of(*target, first, classes) {
            state[2] = row[at];
        }
    }
}

/// The state of all classes, from those of two sets that have none in common:
/// `m = max(m_a, m_b)`, `sum = sum_a exp(m_a - m) + sum_b exp(m_b - m)`, and the target's logit
/// from the set that has it; the other's is 0. other, state: `[t, 3]`.
pub fn loss_join(other: &[f64], state: &mut [f64]) {
    for (other, state) in other.chunks_exact(3).zip(state.chunks_exact_mut(3)) {
        let top = state[0].max(other[0]);
        if top > f64::NEG_INFINITY {
            state[1] = state[1] * (state[0] - top).exp() + other[1] * (other[0] - top).exp();
            state[0] = top;
        }
        state[2] += other[2];
    }
}

/// `lse = m + ln(sum)`, and the sum of `lse - target logit` over tokens whose target is not
/// negative. state: `[t, 3]`, targets: `[t]`. Returns (lse, loss).
#[must_use]
pub fn loss_finish(state: &[f64], targets: &[i32]) -> (Vec<f64>, f64) {
    let (mut lse, mut loss) = (Vec::new(), 0.0);
    for (state, target) in state.chunks_exact(3).zip(targets) {
        let log_sum = state[0] + state[1].ln();
        lse.push(log_sum);
        loss += if *target < 0 { 0.0 } else { log_sum - state[2] };
    }
    (lse, loss)
}

/// `(exp(logit_j - lse) - [first + j == target]) scale`: the gradient of `scale` times
/// [`loss_finish`]'s loss; zero where the target is negative.
/// logits: `[t, v_k]`, targets, lse: `[t]`.
#[must_use]
pub fn loss_backward(
    logits: &[f64],
    first: usize,
    targets: &[i32],
    lse: &[f64],
    scale: f64,
) -> Vec<f64> {
    let classes = logits.len() / targets.len().max(1);
    let gradient = |(at, logit): (usize, &f64)| {
        let (i, j) = (at / classes, at % classes);
        let hit = row_of(targets[i], first, classes) == Some(j);
        let softmax = (logit - lse[i]).exp();
        if targets[i] < 0 { 0.0 } else { (softmax - f64::from(u8::from(hit))) * scale }
    };
    logits.iter().enumerate().map(gradient).collect()
}

/// `m = beta1 m + (1 - beta1) g`, `v = beta2 v + (1 - beta2) g^2`, then `w = w - lr decay w - lr
/// m_hat / (sqrt(v_hat) + eps)` with `m_hat = m / (1 - beta1^step)`, and v_hat alike (Loshchilov,
/// Hutter 2019, algorithm 2, with the decay times lr as in `torch.optim.AdamW`).
pub fn adamw(step: &AdamW, w: &mut [f64], g: &[f64], m: &mut [f64], v: &mut [f64]) {
    let [lr, beta1, beta2, eps, decay, grad_scale] =
        [step.lr, step.beta1, step.beta2, step.eps, step.weight_decay, step.grad_scale]
            .map(f64::from);
    for i in 0..w.len() {
        let g = g[i] * grad_scale;
        m[i] = beta1 * m[i] + (1.0 - beta1) * g;
        v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
        let m_hat = m[i] / (1.0 - beta1.powf(step.step as f64));
        let v_hat = v[i] / (1.0 - beta2.powf(step.step as f64));
        w[i] = w[i] - lr * decay * w[i] - lr * m_hat / (v_hat.sqrt() + eps);
    }
}

/// `m = momentum m + g`, `w = w - lr decay w - lr m`: `torch.optim.SGD` without dampening, but for
/// the decay, which stays out of m. With no momentum m may be empty.
pub fn sgd(step: &Sgd, w: &mut [f64], g: &[f64], m: &mut [f64]) {
    let [lr, momentum, decay, grad_scale] =
        [step.lr, step.momentum, step.weight_decay, step.grad_scale].map(f64::from);
    for i in 0..w.len() {
        let mut update = g[i] * grad_scale;
        if momentum != 0.0 {
            m[i] = momentum * m[i] + update;
            update = m[i];
        }
        w[i] = w[i] - lr * decay * w[i] - lr * update;
    }
}

/// `sum of x[i]^2`.
#[must_use]
pub fn squared_norm(x: &[f64]) -> f64 {
    dot(x, x)
}

/// `x / (1 - p)` where the element's uniform number reached p, else 0 (Srivastava et al. 2014,
/// inverted).
#[must_use]
pub fn dropout(p: f32, uniform: f32, x: f64) -> f64 {
    if uniform >= p { x / (1.0 - f64::from(p)) } else { 0.0 }
}
