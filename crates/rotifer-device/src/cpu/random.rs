//! Random numbers that are a function of their index: Philox4x32-10 (Salmon, Moraes, Dror, Shaw,
//! "Parallel random numbers: as easy as 1, 2, 3", 2011).
//!
//! Number i of a stream is word `i % 4` of the block whose counter is (i / 4, stream), both 64 bits
//! wide, low half first, under the seed as key.

use super::simd::{ln, map, sin_cos};
use super::team::{Team, part};
use super::view::Span;
use crate::Stream;

/// Counters that are worked on together, one per lane of a vector.
const COUNTERS: usize = 16;
/// Numbers they make.
const GROUP: usize = 4 * COUNTERS;
/// Groups of a task.
const GROUPS_PER_TASK: usize = 64;

/// The numbers `64 * group ..` of a stream, all 32 bits of them.
#[inline(always)]
fn words(stream: Stream, group: u64) -> [u32; GROUP] {
    let halves = |x: u64| (x as u32, (x >> 32) as u32);
    let (mut key0, mut key1) = halves(stream.seed);
    let (stream0, stream1) = halves(stream.stream);
    let mut x = [[0_u32; COUNTERS]; 4];
    for lane in 0..COUNTERS {
        let (low, high) = halves(group.wrapping_mul(COUNTERS as u64) + lane as u64);
        (x[0][lane], x[1][lane], x[2][lane], x[3][lane]) = (low, high, stream0, stream1);
    }
    for _ in 0..10 {
        for lane in 0..COUNTERS {
            let (low0, high0) = halves(0xD251_1F53 * u64::from(x[0][lane]));
            let (low1, high1) = halves(0xCD9E_8D57 * u64::from(x[2][lane]));
            x[0][lane] = high1 ^ x[1][lane] ^ key0;
            x[1][lane] = low1;
            x[2][lane] = high0 ^ x[3][lane] ^ key1;
            x[3][lane] = low0;
        }
        key0 = key0.wrapping_add(0x9E37_79B9);
        key1 = key1.wrapping_add(0xBB67_AE85);
    }
    let mut numbers = [0; GROUP];
    for lane in 0..COUNTERS {
        for word in 0..4 {
            numbers[4 * lane + word] = x[word][lane];
        }
    }
    numbers
}

/// The upper 24 bits as a number in `[0, 1)`, exact.
#[inline(always)]
fn unit(word: u32) -> f32 {
    const ULP: f32 = 1.0 / (1 << 24) as f32;
    (word >> 8) as f32 * ULP
}

/// Box and Muller's pair of normal numbers from two words.
#[inline(always)]
fn normal_pair(a: u32, b: u32) -> (f32, f32) {
    // In (0, 1], small numbers as fine as 32 bits allow: they make the tails, to 6.6 sigma.
    let radius = (-2.0 * ln((a as f32 + 1.0) * (1.0 / 4_294_967_296.0))).sqrt();
    // The upper bits name the nearest quarter of the turn; the rest is the angle from there.
    let quadrant = (b.wrapping_add(1 << 29) >> 30).cast_signed();
    let rest = b.wrapping_sub(quadrant.cast_unsigned() << 30).cast_signed();
    let (sin, cos) = sin_cos(quadrant, rest as f32 * (std::f32::consts::TAU / 4_294_967_296.0));
    (radius * cos, radius * sin)
}

/// Calls `f(numbers of a group, where in the group, where in the region)` for all groups that
/// `first .. first + n` touches.
#[inline(always)]
fn each_group(
    team: Team,
    stream: Stream,
    first: u64,
    n: usize,
    f: impl Fn([u32; GROUP], std::ops::Range<usize>, usize) + Send + Sync,
) {
    let skip = (first % GROUP as u64) as usize;
    let groups = (skip + n).div_ceil(GROUP);
    team.each(
        groups.div_ceil(GROUPS_PER_TASK),
        #[inline(always)]
        |task| {
            for group in part(task, GROUPS_PER_TASK, groups) {
                let numbers = words(stream, first / GROUP as u64 + group as u64);
                let start = if group == 0 { skip } else { 0 };
                let end = GROUP.min(skip + n - group * GROUP);
                f(numbers, start..end, group * GROUP + start - skip);
            }
        },
    );
}

/// `x[i] = mean + std * normal(first + i)`; an even number and the next one are a pair.
pub(super) fn normal(team: Team, stream: Stream, first: u64, mean: f32, std: f32, x: Span<f32>) {
    each_group(
        team,
        stream,
        first,
        x.len(),
        #[inline(always)]
        |words, within, at| {
            let mut values = [0.0; GROUP];
            for pair in 0..GROUP / 2 {
                let (a, b) = normal_pair(words[2 * pair], words[2 * pair + 1]);
                values[2 * pair] = std.mul_add(a, mean);
                values[2 * pair + 1] = std.mul_add(b, mean);
            }
            // SAFETY: this group's elements are its task's own.
            unsafe { x.slice_mut(at..at + within.len()) }.copy_from_slice(&values[within]);
        },
    );
}

/// `x[i] = low + (high - low) * uniform(first + i)`.
pub(super) fn uniform(team: Team, stream: Stream, first: u64, low: f32, high: f32, x: Span<f32>) {
    // Rounding must not reach `high`.
    let most = if high > low { high.next_down() } else { low };
    each_group(
        team,
        stream,
        first,
        x.len(),
        #[inline(always)]
        |words, within, at| {
            let mut values = [0.0; GROUP];
            for (value, word) in values.iter_mut().zip(words) {
                *value = (high - low).mul_add(unit(word), low).min(most);
            }
            // SAFETY: this group's elements are its task's own.
            unsafe { x.slice_mut(at..at + within.len()) }.copy_from_slice(&values[within]);
        },
    );
}

/// What dropout leaves of x: nothing of a dropped infinity or NaN either.
#[inline(always)]
fn kept(factor: f32, x: f32) -> f32 {
    if factor == 0.0 { 0.0 } else { x * factor }
}

/// Inverted dropout of x into y, which may be x if it is set.
pub(super) fn dropout(
    team: Team,
    stream: Stream,
    first: u64,
    p: f32,
    [x, y]: [Span<f32>; 2],
    add: bool,
) {
    let scale = if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 };
    each_group(
        team,
        stream,
        first,
        x.len(),
        #[inline(always)]
        |words, within, at| {
            let mut factors = [0.0; GROUP];
            for i in 0..GROUP {
                // Arithmetic, not a branch, which a random number would mislead every other time.
                factors[i] = f32::from(u8::from(unit(words[i]) >= p)) * scale;
            }
            let factors = factors[within.start..].as_ptr();
            let (x, y) = (x.ptr().wrapping_add(at).cast_const(), y.ptr().wrapping_add(at));
            // SAFETY: this group's elements are its task's own; y is x or apart from it.
            unsafe {
                if add {
                    map(
                        within.len(),
                        [factors, x, y],
                        [y],
                        #[inline(always)]
                        |_, [factor, x, y]| [y + kept(factor, x)],
                    );
                } else {
                    map(
                        within.len(),
                        [factors, x],
                        [y],
                        #[inline(always)]
                        |_, [factor, x]| [kept(factor, x)],
                    );
                }
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first and third known answer of the Random123 distribution.
    #[test]
    fn words_are_philox() {
        let zero = words(Stream { seed: 0, stream: 0 }, 0);
        assert_eq!(zero[..4], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let seed = 0x299f_31d0_a409_3822;
        let stream = 0x0370_7344_1319_8a2e;
        let counter: u64 = 0x85a3_08d3_243f_6a88;
        let pi = words(Stream { seed, stream }, counter / 16);
        let at = 4 * (counter % 16) as usize;
        assert_eq!(pi[at..at + 4], [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }
}
