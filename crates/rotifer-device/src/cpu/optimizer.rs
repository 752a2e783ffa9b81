//! Fused optimiser updates and the gradient's norm.

use super::activation::elementwise;
use super::simd::LANES;
use super::team::{Team, part};
use super::view::Span;
use crate::{AdamW, Sgd};

/// Parts that a sum of squares is cut in: fixed, so that its bits do not depend on the threads.
const NORM_PARTS: usize = 64;

/// One AdamW update of w, m and v by g.
pub(super) fn adamw(team: Team, step: &AdamW, [w, g, m, v]: [Span<f32>; 4]) {
    let correction = |beta: f32| 1.0 - f64::from(beta).powf(step.step as f64);
    #[expect(clippy::cast_possible_truncation, reason = "computed in f64 once, used in f32")]
    let (rate, root_scale) = (
        (f64::from(step.lr) / correction(step.beta1)) as f32,
        (1.0 / correction(step.beta2).sqrt()) as f32,
    );
    let AdamW { beta1, beta2, eps, grad_scale, .. } = *step;
    let keep = 1.0 - step.lr * step.weight_decay;
    elementwise(
        team,
        [w, g, m, v],
        [w, m, v],
        #[inline(always)]
        |_, [w, g, m, v]| {
            let g = g * grad_scale;
            let m = (1.0 - beta1).mul_add(g - m, m);
            let v = beta2.mul_add(v, (1.0 - beta2) * g * g);
            let denominator = v.sqrt().mul_add(root_scale, eps);
            [w * keep - rate * m / denominator, m, v]
        },
    );
}

/// One SGD update of w and, with momentum, of m.
pub(super) fn sgd(team: Team, step: &Sgd, w: Span<f32>, g: Span<f32>, m: Option<Span<f32>>) {
    let Sgd { lr, momentum, grad_scale, .. } = *step;
    let keep = 1.0 - lr * step.weight_decay;
    match m {
        None => elementwise(
            team,
            [w, g],
            [w],
            #[inline(always)]
            |_, [w, g]| [w * keep - lr * (g * grad_scale)],
        ),
        Some(m) => elementwise(
            team,
            [w, g, m],
            [w, m],
            #[inline(always)]
            |_, [w, g, m]| {
                let m = momentum.mul_add(m, g * grad_scale);
                [w * keep - lr * m, m]
            },
        ),
    }
}

/// `sum += sum of x[i]^2`. Squares and sums in `f64`: exact but for the last bits of the sum.
pub(super) fn squared_norm(team: Team, x: Span<f32>, sum: Span<f64>) {
    let mut parts = [0.0; NORM_PARTS];
    let to = Span::new(parts.as_mut_ptr(), NORM_PARTS);
    let per = x.len().div_ceil(NORM_PARTS).max(1024);
    team.each(
        x.len().div_ceil(per),
        #[inline(always)]
        |i| {
            // SAFETY: x is only read, and each task writes its own part.
            let (x, to) = unsafe { (x.slice(part(i, per, x.len())), to.slice_mut(i..i + 1)) };
            to[0] = squares(x);
        },
    );
    // SAFETY: one element, which no task touches.
    let sum = unsafe { sum.slice_mut(0..1) };
    sum[0] += parts.iter().sum::<f64>();
}

#[inline(always)]
fn squares(x: &[f32]) -> f64 {
    let mut lanes = [0.0_f64; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        let mut wide = [0.0_f64; LANES];
        for i in 0..LANES {
            wide[i] = f64::from(block[i]);
        }
        for i in 0..LANES {
            lanes[i] = wide[i].mul_add(wide[i], lanes[i]);
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(rest) {
        let value = f64::from(value);
        *lane = value.mul_add(value, *lane);
    }
    lanes.iter().sum()
}
