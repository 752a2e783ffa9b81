//! Elementwise nonlinearities, plain and gated.

use super::simd::{map, normal_cdf_pdf, sigmoid};
use super::team::{CHUNK, Team, part};
use super::view::Span;
use crate::Activation;

/// A nonlinearity with its derivative, as a type, so that each gets loops of its own.
trait Curve {
    /// `(f(x), f'(x))`. What the caller does not use is not computed.
    fn both(x: f32) -> (f32, f32);
}

struct GeluTanh;
struct GeluErf;
struct Silu;

impl Curve for GeluTanh {
    /// `(1 + tanh u) / 2 = sigmoid(2 u)` saves the tanh, and its cancellation for negative x.
    #[inline(always)]
    fn both(x: f32) -> (f32, f32) {
        const TWO_SQRT_2_OVER_PI: f32 = 1.595_769;
        const CUBIC: f32 = 0.044_715;
        let square = x * x;
        let s = sigmoid(TWO_SQRT_2_OVER_PI * x * CUBIC.mul_add(square, 1.0));
        let slope = TWO_SQRT_2_OVER_PI * (3.0 * CUBIC).mul_add(square, 1.0);
        (x * s, (x * s * (1.0 - s)).mul_add(slope, s))
    }
}

impl Curve for GeluErf {
    #[inline(always)]
    fn both(x: f32) -> (f32, f32) {
        let (cdf, pdf) = normal_cdf_pdf(x);
        (x * cdf, x.mul_add(pdf, cdf))
    }
}

impl Curve for Silu {
    #[inline(always)]
    fn both(x: f32) -> (f32, f32) {
        let s = sigmoid(x);
        (x * s, s * x.mul_add(1.0 - s, 1.0))
    }
}

/// Calls `$kernel::<Curve>` for the nonlinearity at hand.
macro_rules! per_curve {
    ($f:expr, $kernel:ident($($argument:expr),*)) => {
        match $f {
            Activation::GeluTanh => $kernel::<GeluTanh>($($argument),*),
            Activation::GeluErf => $kernel::<GeluErf>($($argument),*),
            Activation::Silu => $kernel::<Silu>($($argument),*),
        }
    };
}

/// `y = f(x)`.
pub(super) fn activation(team: Team, f: Activation, x: Span<f32>, y: Span<f32>) {
    per_curve!(f, forward(team, x, y));
}

/// `dx = f'(x) dy`.
pub(super) fn backward(team: Team, f: Activation, [x, dy, dx]: [Span<f32>; 3]) {
    per_curve!(f, backward_of(team, [x, dy, dx]));
}

/// `y = f(gate) up`.
pub(super) fn gated(team: Team, f: Activation, [gate, up, y]: [Span<f32>; 3]) {
    per_curve!(f, gated_of(team, [gate, up, y]));
}

/// `dgate = f'(gate) up dy`, `dup = f(gate) dy`.
pub(super) fn gated_backward(
    team: Team,
    f: Activation,
    inputs: [Span<f32>; 3],
    out: [Span<f32>; 2],
) {
    per_curve!(f, gated_backward_of(team, inputs, out));
}

fn forward<C: Curve>(team: Team, x: Span<f32>, y: Span<f32>) {
    elementwise(
        team,
        [x],
        [y],
        #[inline(always)]
        |_, [x]| [C::both(x).0],
    );
}

fn backward_of<C: Curve>(team: Team, [x, dy, dx]: [Span<f32>; 3]) {
    elementwise(
        team,
        [x, dy],
        [dx],
        #[inline(always)]
        |_, [x, dy]| [C::both(x).1 * dy],
    );
}

fn gated_of<C: Curve>(team: Team, [gate, up, y]: [Span<f32>; 3]) {
    elementwise(
        team,
        [gate, up],
        [y],
        #[inline(always)]
        |_, [gate, up]| [C::both(gate).0 * up],
    );
}

fn gated_backward_of<C: Curve>(team: Team, inputs: [Span<f32>; 3], outputs: [Span<f32>; 2]) {
    elementwise(
        team,
        inputs,
        outputs,
        #[inline(always)]
        |_, [gate, up, dy]| {
            let (value, slope) = C::both(gate);
            [slope * up * dy, value * dy]
        },
    );
}

/// `outputs[..][i] = f(i, inputs[..][i])` for all elements, on all threads. All spans have one
/// length; an output is the same as an input or apart from it.
#[inline(always)]
pub(super) fn elementwise<const I: usize, const O: usize>(
    team: Team,
    inputs: [Span<f32>; I],
    outputs: [Span<f32>; O],
    f: impl Fn(usize, [f32; I]) -> [f32; O] + Send + Sync,
) {
    let n = outputs[0].len();
    assert!(inputs.iter().chain(&outputs).all(|span| span.len() == n));
    team.each(
        n.div_ceil(CHUNK),
        #[inline(always)]
        |i| {
            let range = part(i, CHUNK, n);
            let start = range.start;
            let inputs = inputs.map(|span| span.ptr().wrapping_add(start).cast_const());
            let outputs = outputs.map(|span| span.ptr().wrapping_add(start));
            // SAFETY: elements `range` of each span, which no other task touches.
            unsafe {
                map(
                    range.len(),
                    inputs,
                    outputs,
                    #[inline(always)]
                    |at, x| f(start + at, x),
                );
            }
        },
    );
}
