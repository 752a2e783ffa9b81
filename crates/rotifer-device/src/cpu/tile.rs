//! The innermost loop of every matrix product: a tile of c held in registers.
//!
//! One product form serves the blocked matmul and attention alike: rows of b lie contiguous, a is
//! read one element at a time with any strides. Each element of c is one chain of fused
//! multiply-adds in the order of k, wherever it lies in a tile and whatever the instruction set:
//! how a product is cut never changes its bits.

use pulp::{Simd, WithSimd};

/// Vectors in a full tile's row.
const VECTORS: usize = 2;
/// Largest k of a [`product`] whose n is not a multiple of the vectors' length.
pub(super) const TAIL_DEPTH: usize = 64;
/// The longest vectors.
const TAIL_LANES: usize = 16;

/// a of a product: element (i, p) is `ptr[i * rs + p * cs]`.
#[derive(Clone, Copy)]
pub(super) struct Left {
    pub(super) ptr: *const f32,
    pub(super) rs: usize,
    pub(super) cs: usize,
}

/// b of a product: element (p, j) is `ptr[p * rs + j]`.
#[derive(Clone, Copy)]
pub(super) struct Right {
    pub(super) ptr: *const f32,
    pub(super) rs: usize,
}

/// c of a product: element (i, j) is `ptr[i * rs + j]`, and is added to or set.
#[derive(Clone, Copy)]
pub(super) struct Out {
    pub(super) ptr: *mut f32,
    pub(super) rs: usize,
    pub(super) add: bool,
}

/// Rows of a full tile: as many as the registers hold beside one row of b and one element of a.
#[inline(always)]
pub(super) const fn tile_rows<S: Simd>() -> usize {
    if S::REGISTER_COUNT >= 32 { 12 } else { 6 }
}

/// Columns of a full tile.
#[inline(always)]
pub(super) const fn tile_cols<S: Simd>() -> usize {
    VECTORS * S::F32_LANES
}

/// `c = a b` or `c += a b` for operands that fit the cache. a: `[m, k]`, b: `[k, n]`, c: `[m, n]`.
///
/// # Panics
/// If k is more than [`TAIL_DEPTH`] and n not a multiple of the vectors' length.
///
/// # Safety
/// All three must be good for their shapes, and c be apart from a and b.
#[inline(always)]
pub(super) unsafe fn product<S: Simd>(
    simd: S,
    (m, n, k): (usize, usize, usize),
    a: Left,
    b: Right,
    c: Out,
) {
    let lanes = S::F32_LANES;
    let whole = n / lanes * lanes;
    for j in (0..whole).step_by(tile_cols::<S>()) {
        let cols = tile_cols::<S>().min(whole - j);
        // SAFETY: columns j..j + cols of b and c, within their shapes.
        unsafe {
            let (b, c) = (Right { ptr: b.ptr.add(j), ..b }, Out { ptr: c.ptr.add(j), ..c });
            strip(simd, (m, cols, k), a, b, c);
        }
    }
    if whole < n {
        // `strip` reads whole vectors of b, so the last columns are copied to where it may.
        assert!(k <= TAIL_DEPTH && lanes <= TAIL_LANES);
        let mut tail = [0.0_f32; TAIL_DEPTH * TAIL_LANES];
        for (p, row) in tail.chunks_exact_mut(lanes).take(k).enumerate() {
            for (j, x) in row[..n - whole].iter_mut().enumerate() {
                // SAFETY: element (p, whole + j) of b.
                *x = unsafe { *b.ptr.add(p * b.rs + whole + j) };
            }
        }
        // SAFETY: the columns of c from `whole` on.
        unsafe {
            let (b, c) =
                (Right { ptr: tail.as_ptr(), rs: lanes }, Out { ptr: c.ptr.add(whole), ..c });
            strip(simd, (m, n - whole, k), a, b, c);
        }
    }
}

/// As [`product`], for n of at most one tile, and any k.
///
/// # Safety
/// As [`product`]; rows of b must be good for n rounded up to whole vectors.
#[inline(always)]
pub(super) unsafe fn strip<S: Simd>(
    simd: S,
    (m, n, k): (usize, usize, usize),
    a: Left,
    b: Right,
    c: Out,
) {
    debug_assert!(n <= tile_cols::<S>());
    let lanes = S::F32_LANES;
    // SAFETY: as the caller promises; a strip of less than full width is made of single vectors,
    // the last of which touches only the elements of c that exist.
    unsafe {
        if n == tile_cols::<S>() {
            return rows::<S, VECTORS>(simd, (m, lanes, k), a, b, c);
        }
        for j in (0..n).step_by(lanes) {
            let (b, c) = (Right { ptr: b.ptr.add(j), ..b }, Out { ptr: c.ptr.add(j), ..c });
            rows::<S, 1>(simd, (m, lanes.min(n - j), k), a, b, c);
        }
    }
}

/// All rows of a strip of V vectors, the last of which has `last` elements.
///
/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn rows<S: Simd, const V: usize>(
    simd: S,
    (m, last, k): (usize, usize, usize),
    a: Left,
    b: Right,
    c: Out,
) {
    let mut i = 0;
    while i < m {
        let left = m - i;
        // SAFETY: rows from i on, as many as the chosen tile has, all below m.
        unsafe {
            let a = Left { ptr: a.ptr.add(i * a.rs), ..a };
            let c = Out { ptr: c.ptr.add(i * c.rs), ..c };
            i += if S::REGISTER_COUNT >= 32 && left >= 12 {
                either::<S, 12, V>(simd, last, k, a, b, c)
            } else if left >= 6 {
                either::<S, 6, V>(simd, last, k, a, b, c)
            } else if left >= 4 {
                either::<S, 4, V>(simd, last, k, a, b, c)
            } else if left >= 2 {
                either::<S, 2, V>(simd, last, k, a, b, c)
            } else {
                either::<S, 1, V>(simd, last, k, a, b, c)
            };
        }
    }
}

/// One tile, as a function of its own: inlining all sizes of tile into each kernel would only cost
/// code. Rows of a that lie next to each other get code with constant offsets. Returns M.
///
/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn either<S: Simd, const M: usize, const V: usize>(
    simd: S,
    last: usize,
    k: usize,
    a: Left,
    b: Right,
    c: Out,
) -> usize {
    let rows = [0, a.rs, 2 * a.rs, 3 * a.rs, 4 * a.rs];
    if a.rs == 1 {
        simd.vectorize(Tile::<M, V, true> { last, k, a, rows, b, c });
    } else {
        simd.vectorize(Tile::<M, V, false> { last, k, a, rows, b, c });
    }
    M
}

/// M rows by V vectors of c. Made only by [`either`], whose caller promises that operands are good
/// for that.
struct Tile<const M: usize, const V: usize, const PACKED: bool> {
    last: usize,
    k: usize,
    a: Left,
    /// Distances of rows 0 to 4 of a from row 0. The compiler does not know that they are multiples
    /// of one number: it would make each row's address from the one before, a chain as long as the
    /// arithmetic itself.
    rows: [usize; 5],
    b: Right,
    c: Out,
}

impl<const M: usize, const V: usize, const PACKED: bool> WithSimd for Tile<M, V, PACKED> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // SAFETY: as the caller of `either` promises.
        unsafe { self.run(simd) };
    }
}

impl<const M: usize, const V: usize, const PACKED: bool> Tile<M, V, PACKED> {
    /// k steps of one row of b each.
    ///
    /// # Safety
    /// As [`product`]. A tile of more than one vector must be full.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let Tile { last, k, a, rows, b, c } = self;
        let lanes = S::F32_LANES;
        #[expect(clippy::cast_possible_truncation, reason = "at most a vector's length")]
        let mask = simd.mask_between_m32s(0, last as u32);
        let zero = simd.splat_f32s(0.0);
        let mut sums = [[zero; V]; M];
        // SAFETY: c is touched in `last` elements of a single vector, or in whole vectors of a full
        // tile; b in whole vectors, a in M rows and k columns, as the caller promises.
        unsafe {
            let load = |ptr: *const f32| ptr.cast::<S::f32s>().read_unaligned();
            let (mut a_at, mut b_at) = (a.ptr, b.ptr);
            for _ in 0..k {
                let mut row = [zero; V];
                for v in 0..V {
                    row[v] = load(b_at.add(v * lanes));
                }
                for i in 0..M {
                    let offset = if PACKED { i } else { i / 4 * rows[4] + rows[i % 4] };
                    let x = simd.splat_f32s(*a_at.add(offset));
                    for v in 0..V {
                        sums[i][v] = simd.mul_add_f32s(x, row[v], sums[i][v]);
                    }
                }
                // Wrapping: after the last step these may point past the operand.
                a_at = a_at.wrapping_add(a.cs);
                b_at = b_at.wrapping_add(b.rs);
            }
            for i in 0..M {
                for v in 0..V {
                    let (to, mut sum) = (c.ptr.add(i * c.rs + v * lanes), sums[i][v]);
                    if V > 1 || last == lanes {
                        if c.add {
                            sum = simd.add_f32s(load(to), sum);
                        }
                        to.cast::<S::f32s>().write_unaligned(sum);
                    } else {
                        if c.add {
                            sum = simd.add_f32s(simd.mask_load_ptr_f32s(mask, to), sum);
                        }
                        simd.mask_store_ptr_f32s(mask, to, sum);
                    }
                }
            }
        }
    }
}
