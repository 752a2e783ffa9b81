//! Rotary position embedding.

use super::simd::{reduce_angle, sin_cos};
use super::team::{Team, part};
use super::view::{Rows, Span};
use crate::Rotary;

/// Most channels of a head: the tables of angles live on the stack.
const HEAD_DIM_MAX: usize = 512;

/// Turns the leading heads of each row in place.
///
/// Angles are computed in `f64`: in `f32` those at position 131,072 would be off by 1e-2.
pub(super) fn rotary(team: Team, rotary: &Rotary, positions: Span<i32>, x: Rows) {
    let Rotary { heads, head_dim, theta, inverse } = *rotary;
    let half = head_dim / 2;
    assert!(head_dim % 2 == 0 && head_dim <= HEAD_DIM_MAX, "rotary heads of {head_dim} channels");
    assert!(heads * head_dim <= x.cols, "{heads} heads of {head_dim} in {} columns", x.cols);
    let mut frequencies = [0.0_f64; HEAD_DIM_MAX / 2];
    for (i, frequency) in frequencies[..half].iter_mut().enumerate() {
        *frequency = f64::from(theta).powf(-2.0 * i as f64 / head_dim as f64);
    }
    let sign = if inverse { -1.0 } else { 1.0 };
    let per = Team::rows_per_task(heads * head_dim);
    team.each(
        x.rows.div_ceil(per),
        #[inline(always)]
        |task| {
            let (mut sin, mut cos) = ([0.0_f32; HEAD_DIM_MAX / 2], [0.0_f32; HEAD_DIM_MAX / 2]);
            for i in part(task, per, x.rows) {
                // SAFETY: positions are only read; row i is this task's own.
                let (position, row) = unsafe { (positions.slice(i..i + 1)[0], x.row_mut(i)) };
                let turn = sign * f64::from(position);
                let tables = sin[..half].iter_mut().zip(&mut cos[..half]);
                for ((sin, cos), frequency) in tables.zip(&frequencies[..half]) {
                    let (quadrant, rest) = reduce_angle(turn * frequency);
                    (*sin, *cos) = sin_cos(quadrant, rest);
                }
                for head in row[..heads * head_dim].chunks_exact_mut(head_dim.max(1)) {
                    let (first, second) = head.split_at_mut(half);
                    for (((a, b), sin), cos) in first.iter_mut().zip(second).zip(&sin).zip(&cos) {
                        (*a, *b) = (a.mul_add(*cos, -*b * sin), b.mul_add(*cos, *a * sin));
                    }
                }
            }
        },
    );
}
