//! Functions of one number, written so that a loop over them becomes vector code, and reductions
//! with a fixed number of partial sums.
//!
//! Everything here is `inline(always)`: the code takes the instruction set of the kernel it lands
//! in (AVX2, AVX-512 or the baseline), which `Team` chooses once at run time. Products and sums
//! that may fuse are written as `mul_add`, so that all instruction sets round alike.

use std::f32::consts::{FRAC_1_SQRT_2, LOG2_E};

/// Partial sums of a reduction, and elements of one block of [`map`].
pub(super) const LANES: usize = 32;

/// 1.5 * 2^23: adding it leaves a float's nearest integer in the low bits of the mantissa.
const ROUND: f32 = 12_582_912.0;

/// `e^x` within 2 units in the last place. Below -87.7 it is 0 (so `exp(-inf)` is), and above 88.3,
/// a hair before `f32` ends, infinite. NaN stays.
///
/// Cody and Waite's reduction with the polynomial of Cephes' `expf`.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // These bounds give the exponents -127 and 128, which the last line turns into 0 and infinity.
    let x = x.clamp(-88.0, 89.0);
    let shifted = x.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-0.693_359_4, x);
    let r = n.mul_add(2.121_944_4e-4, r);
    let p = 1.987_569_1e-4_f32
        .mul_add(r, 1.398_199_9e-3)
        .mul_add(r, 8.333_452e-3)
        .mul_add(r, 4.166_579_6e-2)
        .mul_add(r, 1.666_666_5e-1)
        .mul_add(r, 0.5)
        .mul_add(r * r, r + 1.0);
    p * f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000))
}

/// `ln(x)` for normal positive x within 1 unit in the last place: FreeBSD's `logf`.
#[inline(always)]
pub(super) fn ln(x: f32) -> f32 {
    const SQRT_HALF: u32 = 0x3f35_04f3;
    let shifted = x.to_bits().wrapping_sub(SQRT_HALF);
    let k = (shifted.cast_signed() >> 23) as f32;
    let f = f32::from_bits((shifted & 0x007f_ffff) + SQRT_HALF) - 1.0;
    let s = f / (2.0 + f);
    let z = s * s;
    let w = z * z;
    let odd = w * 0.242_790_79_f32.mul_add(w, 0.400_009_72);
    let even = z * 0.284_987_87_f32.mul_add(w, 0.666_666_6);
    let half_square = 0.5 * f * f;
    // ln 2 in two parts, the first of few enough bits that k times it is exact.
    s * (half_square + (odd + even)) + k * 9.058e-6 - half_square + f + k * 0.693_138_1
}

/// `(sin, cos)` of `r + quadrant * pi / 2` for |r| <= pi/4, by the polynomials of Cephes' `sinf`.
#[inline(always)]
pub(super) fn sin_cos(quadrant: i32, r: f32) -> (f32, f32) {
    let z = r * r;
    let sin = (-1.951_529_6e-4_f32)
        .mul_add(z, 8.332_161e-3)
        .mul_add(z, -1.666_665_5e-1)
        .mul_add(z * r, r);
    let cos = 2.443_315_7e-5_f32
        .mul_add(z, -1.388_731_6e-3)
        .mul_add(z, 4.166_664_6e-2)
        .mul_add(z * z, 0.5_f32.mul_add(-z, 1.0));
    let (sin, cos) = if quadrant & 1 == 0 { (sin, cos) } else { (cos, sin) };
    let sin_sign = (quadrant & 2).cast_unsigned() << 30;
    let cos_sign = (quadrant.wrapping_add(1) & 2).cast_unsigned() << 30;
    (f32::from_bits(sin.to_bits() ^ sin_sign), f32::from_bits(cos.to_bits() ^ cos_sign))
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The standard normal distribution function of x and its density.
///
/// `1 - erf(z) = (a1 t + ... + a5 t^5) e^(-z^2)`, t = 1 / (1 + p z): Abramowitz and Stegun 7.1.26,
/// absolute error 1.5e-7 of erf.
#[inline(always)]
pub(super) fn normal_cdf_pdf(x: f32) -> (f32, f32) {
    const INV_SQRT_2_PI: f32 = 0.398_942_3;
    let z = x.abs() * FRAC_1_SQRT_2;
    let t = 1.0 / 0.327_591_1_f32.mul_add(z, 1.0);
    let gauss = exp(-z * z);
    let poly = 1.061_405_4_f32
        .mul_add(t, -1.453_152)
        .mul_add(t, 1.421_413_8)
        .mul_add(t, -0.284_496_74)
        .mul_add(t, 0.254_829_6);
    let tail = 0.5 * poly * t * gauss;
    (if x < 0.0 { tail } else { 1.0 - tail }, INV_SQRT_2_PI * gauss)
}

/// Angle of a turn by `x` radians as quadrant and rest, reduced in `f64`: good for any position.
#[inline(always)]
pub(super) fn reduce_angle(x: f64) -> (i32, f32) {
    use std::f64::consts::{FRAC_2_PI, FRAC_PI_2};
    /// 1.5 * 2^52, as `ROUND`.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let shifted = x.mul_add(FRAC_2_PI, ROUND);
    let n = shifted - ROUND;
    #[expect(clippy::cast_possible_truncation, reason = "the low bits are the integer")]
    let quadrant = shifted.to_bits() as i32;
    #[expect(clippy::cast_possible_truncation, reason = "at most pi/4, rounded once")]
    let rest = n.mul_add(-FRAC_PI_2, x) as f32;
    (quadrant, rest)
}

/// Sum of the partial results of a reduction, pairwise.
#[inline(always)]
fn combine(mut lanes: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = f(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// Sum of all partial sums.
#[inline(always)]
pub(super) fn sum(lanes: [f32; LANES]) -> f32 {
    combine(lanes, |a, b| a + b)
}

/// Sum of `f(x[i])`.
#[inline(always)]
pub(super) fn sum_of(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for i in 0..LANES {
            lanes[i] += f(block[i]);
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(rest) {
        *lane += f(value);
    }
    sum(lanes)
}

/// Largest element, `-inf` of none. NaN is passed over.
#[inline(always)]
pub(super) fn max(x: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for i in 0..LANES {
            lanes[i] = larger(lanes[i], block[i]);
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(rest) {
        *lane = larger(*lane, value);
    }
    combine(lanes, larger)
}

/// Sum of `x[i] * y[i]`.
#[inline(always)]
pub(super) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let ((xs, x_rest), (ys, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in xs.iter().zip(ys) {
        for i in 0..LANES {
            lanes[i] = x[i].mul_add(y[i], lanes[i]);
        }
    }
    for ((lane, &x), &y) in lanes.iter_mut().zip(x_rest).zip(y_rest) {
        *lane = x.mul_add(y, *lane);
    }
    sum(lanes)
}

/// `to[p * to_stride + i] = from[i * from_stride + p]` for i in `0..rows`, p in `0..cols`.
///
/// # Safety
/// Both must be good for that, and apart.
#[inline(always)]
pub(super) unsafe fn transpose(
    from: *const f32,
    from_stride: usize,
    rows: usize,
    cols: usize,
    to: *mut f32,
    to_stride: usize,
) {
    let (rows_whole, cols_whole) = (rows / SIDE * SIDE, cols / SIDE * SIDE);
    // SAFETY: elements (i, p) below (rows, cols) of each.
    unsafe {
        let one = |i: usize, p: usize| *to.add(p * to_stride + i) = *from.add(i * from_stride + p);
        for i in (0..rows_whole).step_by(SIDE) {
            for p in (0..cols_whole).step_by(SIDE) {
                let (from, to) = (from.add(i * from_stride + p), to.add(p * to_stride + i));
                transpose_square(from, from_stride, to, to_stride);
            }
            for p in cols_whole..cols {
                for i in i..i + SIDE {
                    one(i, p);
                }
            }
        }
        for i in rows_whole..rows {
            for p in 0..cols {
                one(i, p);
            }
        }
    }
}

/// Side of a square that is turned in registers.
const SIDE: usize = 4;

/// Turns one square. With explicit vectors: from plain loops the compiler makes scattered stores of
/// single elements, four times slower.
///
/// # Safety
/// As [`transpose`], for [`SIDE`] rows and columns.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn transpose_square(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
    use std::arch::x86_64::{
        _mm_loadu_ps, _mm_movehl_ps, _mm_movelh_ps, _mm_storeu_ps, _mm_unpackhi_ps, _mm_unpacklo_ps,
    };
    // SAFETY: SSE is part of x86-64; the rest as the caller promises.
    unsafe {
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| _mm_loadu_ps(from.add(i * from_stride)));
        let (ab_low, ab_high) = (_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
        let (cd_low, cd_high) = (_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
        _mm_storeu_ps(to, _mm_movelh_ps(ab_low, cd_low));
        _mm_storeu_ps(to.add(to_stride), _mm_movehl_ps(cd_low, ab_low));
        _mm_storeu_ps(to.add(2 * to_stride), _mm_movelh_ps(ab_high, cd_high));
        _mm_storeu_ps(to.add(3 * to_stride), _mm_movehl_ps(cd_high, ab_high));
    }
}

/// Turns one square.
///
/// # Safety
/// As [`transpose`], for [`SIDE`] rows and columns.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
unsafe fn transpose_square(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
    for p in 0..SIDE {
        for i in 0..SIDE {
            // SAFETY: as the caller promises.
            unsafe { *to.add(p * to_stride + i) = *from.add(i * from_stride + p) };
        }
    }
}

/// `outputs[..][i] = f(i, inputs[..][i])` for i in `0..n`. An output may be an input: each block is
/// read before it is written.
///
/// # Safety
/// All pointers must be good for n elements, and an output be an input or apart from it.
#[inline(always)]
pub(super) unsafe fn map<const I: usize, const O: usize>(
    n: usize,
    inputs: [*const f32; I],
    outputs: [*mut f32; O],
    f: impl Fn(usize, [f32; I]) -> [f32; O],
) {
    let whole = n / LANES * LANES;
    // SAFETY: blocks of whole lanes below n, then the rest.
    unsafe {
        for at in (0..whole).step_by(LANES) {
            map_block(at, LANES, inputs, outputs, &f);
        }
        map_block(whole, n - whole, inputs, outputs, &f);
    }
}

/// At most [`LANES`] elements of [`map`] from `at` on. The results stay apart from memory until the
/// block is done: that is what lets the compiler use vectors although an output may be an input.
///
/// # Safety
/// As [`map`], for elements `at .. at + len`.
#[inline(always)]
unsafe fn map_block<const I: usize, const O: usize>(
    at: usize,
    len: usize,
    inputs: [*const f32; I],
    outputs: [*mut f32; O],
    f: &impl Fn(usize, [f32; I]) -> [f32; O],
) {
    let mut results = [[0.0; LANES]; O];
    for i in 0..len {
        let mut x = [0.0; I];
        for k in 0..I {
            // SAFETY: as the caller promises.
            x[k] = unsafe { *inputs[k].add(at + i) };
        }
        let y = f(at + i, x);
        for k in 0..O {
            results[k][i] = y[k];
        }
    }
    for k in 0..O {
        // SAFETY: as the caller promises; `results` is a local.
        unsafe { outputs[k].add(at).copy_from_nonoverlapping(results[k].as_ptr(), len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Largest error of `f` against `g` in units of the last place, over `low..high`.
    fn worst_ulps(low: f32, high: f32, f: impl Fn(f32) -> f32, g: impl Fn(f64) -> f64) -> f64 {
        let steps = 200_000;
        let at = |i: i32| low + (high - low) * i as f32 / steps as f32;
        let ulps = |x: f32| {
            let exact = g(f64::from(x));
            let ulp = f64::from(f32::EPSILON) * exact.abs().log2().floor().exp2();
            (f64::from(f(x)) - exact).abs() / ulp
        };
        (0..=steps).map(|i| ulps(at(i))).fold(0.0, f64::max)
    }

    #[test]
    fn exp_ln_sin_cos_match_f64() {
        assert!(worst_ulps(-86.0, 88.0, exp, f64::exp) < 2.0);
        assert!(worst_ulps(1e-7, 0.9, ln, f64::ln) < 2.0);
        let quarter = std::f32::consts::FRAC_PI_4;
        for (quadrant, turn) in [(0, 0.0), (1, 0.5), (2, 1.0), (-1, -0.5), (7, 3.5)] {
            let turn = turn * std::f64::consts::PI;
            let sin = |x: f32| f64::from(sin_cos(quadrant, x).0);
            let cos = |x: f32| f64::from(sin_cos(quadrant, x).1);
            for i in -100..=100 {
                let x = quarter * i as f32 / 100.0;
                let exact = f64::from(x) + turn;
                assert!((sin(x) - exact.sin()).abs() < 1.5e-7, "{quadrant} {x}");
                assert!((cos(x) - exact.cos()).abs() < 1.5e-7, "{quadrant} {x}");
            }
        }
    }

    #[test]
    fn exp_ends_at_zero_and_infinity() {
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e30), 0.0);
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn normal_cdf_is_within_1e_7() {
        for i in -800..=800 {
            let x = i as f32 / 100.0;
            let exact = 0.5 * libm::erfc(-f64::from(x) / std::f64::consts::SQRT_2);
            assert!((f64::from(normal_cdf_pdf(x).0) - exact).abs() < 2e-7, "{x}");
        }
    }
}
