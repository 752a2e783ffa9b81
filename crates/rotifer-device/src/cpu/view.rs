//! Raw views of regions, and the rule that keeps kernels on them sound.
//!
//! The rule: a view is made only by `CpuDevice`, for the length of one kernel call, after it
//! checked that the bytes exist and that outputs are apart from inputs where the kernel needs it.
//! Regions are not `Send`, so no other kernel runs on these bytes meanwhile; within a kernel each
//! task writes elements of its own. What is left to a kernel's `unsafe` is to stay within the view.

use std::ops::Range;

use crate::{Mat, Region};

/// A run of elements.
#[derive(Clone, Copy)]
pub(super) struct Span<T> {
    ptr: *mut T,
    len: usize,
}

// SAFETY: a view only names memory; see the rule above for why tasks of one kernel do not collide.
unsafe impl<T: Send> Send for Span<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Span<T> {}

impl<T> Span<T> {
    pub(super) const fn new(ptr: *mut T, len: usize) -> Span<T> {
        Span { ptr, len }
    }

    pub(super) const fn len(self) -> usize {
        self.len
    }

    pub(super) const fn ptr(self) -> *mut T {
        self.ptr
    }

    /// # Safety
    /// Nothing may write to these elements while the slice lives.
    #[inline(always)]
    pub(super) unsafe fn slice<'a>(self, range: Range<usize>) -> &'a [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: within the view; unwritten meanwhile, as the caller promises.
        unsafe { std::slice::from_raw_parts(self.ptr.add(range.start), range.len()) }
    }

    /// # Safety
    /// Nothing else may touch these elements while the slice lives.
    #[inline(always)]
    pub(super) unsafe fn slice_mut<'a>(self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: within the view; untouched by others meanwhile, as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(range.start), range.len()) }
    }
}

/// A strided matrix of floats.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    ptr: *mut f32,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) stride: usize,
}

// SAFETY: as for `Span`.
unsafe impl Send for Rows {}
// SAFETY: as for `Span`.
unsafe impl Sync for Rows {}

impl Rows {
    pub(super) const fn new(ptr: *mut f32, rows: usize, cols: usize, stride: usize) -> Rows {
        Rows { ptr, rows, cols, stride }
    }

    /// Where row i begins. `i` may be `rows`, one past the end.
    #[inline(always)]
    pub(super) fn ptr(self, i: usize) -> *mut f32 {
        debug_assert!(i <= self.rows);
        self.ptr.wrapping_add(i * self.stride)
    }

    /// # Safety
    /// Nothing may write to this row while the slice lives.
    #[inline(always)]
    pub(super) unsafe fn row<'a>(self, i: usize) -> &'a [f32] {
        assert!(i < self.rows);
        // SAFETY: a row of the view; unwritten meanwhile, as the caller promises.
        unsafe { std::slice::from_raw_parts(self.ptr(i), self.cols) }
    }

    /// # Safety
    /// Nothing else may touch this row while the slice lives.
    #[inline(always)]
    pub(super) unsafe fn row_mut<'a>(self, i: usize) -> &'a mut [f32] {
        assert!(i < self.rows);
        // SAFETY: a row of the view; untouched by others meanwhile, as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.ptr(i), self.cols) }
    }
}

/// A region as a matrix of one row, so that one overlap test serves both.
pub(super) fn flat(region: Region) -> Mat {
    Mat::new(region, 1, region.len())
}

/// Panics if an output shares an element with another output or with an input.
pub(super) fn assert_apart(outputs: &[Mat], inputs: &[Mat]) {
    for (i, output) in outputs.iter().enumerate() {
        for other in outputs[i + 1..].iter().chain(inputs) {
            assert!(
                !overlap(output, other),
                "an output overlaps another operand: {output:?}, {other:?}"
            );
        }
    }
}

/// Whether two matrices share an element. Column blocks of one wider matrix lie within each other's
/// range of addresses, yet are apart.
fn overlap(a: &Mat, b: &Mat) -> bool {
    let (Some((a_start, a_end)), Some((b_start, b_end))) = (bytes(a), bytes(b)) else {
        return false;
    };
    if a.region.memory != b.region.memory || a_end <= b_start || b_end <= a_start {
        return false;
    }
    let size = a.region.dtype.bytes();
    let same_grid =
        a.rows > 1 && b.rows > 1 && a.stride == b.stride && b.region.dtype.bytes() == size;
    if !same_grid || a_start % size != b_start % size {
        return true;
    }
    // On the common grid a has columns 0..a.cols, and b begins at this column.
    let shift = (b_start / size).abs_diff(a_start / size) % a.stride;
    let column = if b_start >= a_start || shift == 0 { shift } else { a.stride - shift };
    column < a.cols || column + b.cols > a.stride
}

/// First byte of a matrix in its memory, and the one past its last; nothing if it is empty.
fn bytes(m: &Mat) -> Option<(usize, usize)> {
    let size = m.region.dtype.bytes();
    let start = m.region.offset + m.offset * size;
    let last = m.rows.checked_sub(1)? * m.stride + m.cols.checked_sub(1)?;
    Some((start, start + (last + 1) * size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dtype;

    #[test]
    fn column_blocks_of_one_matrix_are_apart() {
        let whole = Mat::new(Region::new(0, 64, 40, Dtype::F32), 4, 10);
        let (left, right) = (whole.columns(0..6), whole.columns(6..10));
        assert!(!overlap(&left, &right) && !overlap(&right, &left));
        assert!(overlap(&left, &whole.columns(5..7)) && overlap(&whole.columns(5..7), &left));
        assert!(!overlap(&whole.rows(0..2), &whole.rows(2..4)));
        assert!(!overlap(&left.rows(2..4), &right.rows(0..3)));
        assert!(overlap(&left.rows(2..4), &whole));
    }
}
