//! Filling, copying and adding.

use super::activation::elementwise;
use super::team::{CHUNK, Team, part};
use super::view::Span;

/// `x = value`.
pub(super) fn fill<T: Copy + Send + Sync>(team: Team, x: Span<T>, value: T) {
    team.each(
        x.len().div_ceil(CHUNK),
        #[inline(always)]
        |i| {
            // SAFETY: each task has its own part.
            unsafe { x.slice_mut(part(i, CHUNK, x.len())) }.fill(value);
        },
    );
}

/// `dst = src`, which are apart.
pub(super) fn copy(team: Team, src: Span<u8>, dst: Span<u8>) {
    const BYTES: usize = 4 * CHUNK;
    team.each_op(src.len().div_ceil(BYTES), |i| {
        let range = part(i, BYTES, src.len());
        // SAFETY: src is only read, and each task has its own part of dst.
        let (src, dst) = unsafe { (src.slice(range.clone()), dst.slice_mut(range)) };
        dst.copy_from_slice(src);
    });
}

/// `dst += src` of `f32`.
pub(super) fn add(team: Team, src: Span<f32>, dst: Span<f32>) {
    elementwise(
        team,
        [src, dst],
        [dst],
        #[inline(always)]
        |_, [x, y]| [y + x],
    );
}

/// `dst += src` of `f64`: a few sums at most.
pub(super) fn add_f64(src: Span<f64>, dst: Span<f64>) {
    // SAFETY: the device checked that they are apart.
    let (src, dst) = unsafe { (src.slice(0..src.len()), dst.slice_mut(0..dst.len())) };
    for (y, x) in dst.iter_mut().zip(src) {
        *y += x;
    }
}

/// Host to device.
pub(super) fn write<T: Copy>(src: &[T], dst: Span<T>) {
    // SAFETY: `dst` was resolved for as many elements; no kernel runs meanwhile.
    unsafe { dst.slice_mut(0..src.len()) }.copy_from_slice(src);
}

/// Device to host.
pub(super) fn read<T: Copy>(src: Span<T>, dst: &mut [T]) {
    // SAFETY: `src` was resolved for as many elements; no kernel runs meanwhile.
    dst.copy_from_slice(unsafe { src.slice(0..dst.len()) });
}
