//! How a kernel uses the threads and the instruction set of its device.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

/// Elements that one task of an elementwise kernel takes: 64 KiB, enough to hide the cost of
/// stealing a task, and few enough that small tensors do not wake other threads at all.
pub(super) const CHUNK: usize = 16 * 1024;

/// The threads and the instruction set of a device. What a kernel computes never depends on
/// `threads`: work is cut in tasks by sizes alone, and no two tasks add to the same element.
#[derive(Clone, Copy, Debug)]
pub(super) struct Team {
    pub(super) arch: Arch,
    pub(super) threads: usize,
}

impl Team {
    /// Calls `f` with each of `0..count`, compiled for the instruction set. For that to hold, `f`
    /// and what it calls must be `inline(always)`.
    #[inline(always)]
    pub(super) fn each(self, count: usize, f: impl Fn(usize) + Send + Sync) {
        self.each_op(count, |i| self.arch.dispatch(Task { f: &f, i }));
    }

    /// Calls `f` with each of `0..count` as it is.
    #[inline(always)]
    pub(super) fn each_op(self, count: usize, f: impl Fn(usize) + Send + Sync) {
        if self.threads == 1 || count < 2 {
            (0..count).for_each(f);
        } else {
            (0..count).into_par_iter().for_each(f);
        }
    }

    /// Runs `op` compiled for the instruction set.
    #[inline(always)]
    pub(super) fn simd<Op: WithSimd>(self, op: Op) -> Op::Output {
        self.arch.dispatch(op)
    }

    /// What kernels are compiled for, for logs.
    pub(super) fn instruction_set(self) -> String {
        format!("{:?}", self.arch).split('(').next().unwrap_or_default().to_owned()
    }

    /// Number of rows of `cols` elements that make a task of about [`CHUNK`] elements.
    pub(super) const fn rows_per_task(cols: usize) -> usize {
        let rows = CHUNK / if cols == 0 { 1 } else { cols };
        if rows == 0 { 1 } else { rows }
    }
}

/// One call of a kernel's closure. Not itself a closure: the shim by which an `Fn` closure is
/// called as an `FnOnce` is not `inline(always)`, and would keep the body from the instruction set.
struct Task<'a, F> {
    f: &'a F,
    i: usize,
}

impl<F: Fn(usize)> WithSimd for Task<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        (self.f)(self.i);
    }
}

/// The part of `0..total` that task `i` takes, where each takes `per`.
#[inline(always)]
pub(super) fn part(i: usize, per: usize, total: usize) -> std::ops::Range<usize> {
    i * per..total.min((i + 1) * per)
}
