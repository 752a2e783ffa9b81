//! The matrix product, in cache-sized blocks (Goto and van de Geijn, "Anatomy of High-Performance
//! Matrix Multiplication", 2008).
//!
//! Why not a crate: `gemm` allocates its packing buffers anew at every call, and chooses the blocks
//! of k by m and n, so that a shard's columns would differ in their last bits from the same columns
//! of the whole. Here an element of c depends on its row of a, its column of b and k alone; but
//! products of [`FEW_ROWS`] rows at most sum in another order than larger ones.
//!
//! m, n, k as in `c[m, n] = a[m, k] b[k, n]`.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ops::Range;
use std::ptr::NonNull;

use pulp::{Simd, WithSimd};

use super::simd;
use super::team::{Team, part};
use super::tile::{Left, Out, Right, strip, tile_cols, tile_rows};

/// Steps of k in a block: a strip of b that long stays in the first-level cache.
const K_BLOCK: usize = 256;
/// Rows of a in a block: it stays in the second-level cache. A multiple of any tile's rows.
const M_BLOCK: usize = 240;
/// Columns of b in a block. A multiple of any tile's columns.
const N_BLOCK: usize = 1024;
/// Below this many multiplications a product is not worth waking another thread for.
const PARALLEL_WORK_MIN: usize = 1 << 20;
/// Up to this many rows of a, a product is bound by reading b, and made of dot products.
const FEW_ROWS: usize = 12;
/// Up to this many columns of b, a is not packed.
const FEW_COLUMNS: usize = 128;

/// An operand: element (i, j) is `ptr[i * rs + j * cs]`.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub(super) ptr: *const f32,
    pub(super) rs: usize,
    pub(super) cs: usize,
}

// SAFETY: names memory that is only read while a product runs.
unsafe impl Send for Operand {}
// SAFETY: as above.
unsafe impl Sync for Operand {}

impl Operand {
    fn at(self, i: usize, j: usize) -> Operand {
        Operand { ptr: self.ptr.wrapping_add(i * self.rs + j * self.cs), ..self }
    }
}

/// One product.
#[derive(Clone, Copy)]
pub(super) struct Product {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) a: Operand,
    pub(super) b: Operand,
    pub(super) c: *mut f32,
    pub(super) c_rs: usize,
    pub(super) add: bool,
}

/// A task's part of a product. The method is that of the whole, so that cutting it changes no bits.
#[derive(Clone, Copy)]
struct Part {
    product: Product,
    dots: bool,
}

// SAFETY: as for `Operand`; each task's part has elements of c of its own.
unsafe impl Send for Product {}
// SAFETY: as above.
unsafe impl Sync for Product {}

/// `c = a b` or `c += a b`.
///
/// # Safety
/// The operands must be good for their shapes, and c be apart from a and b.
pub(super) unsafe fn matmul(team: Team, whole: Product) {
    let Product { m, n, k, a, b, .. } = whole;
    let dots = m <= FEW_ROWS && a.cs == 1 && b.rs == 1;
    if team.threads == 1 || m * n * k < PARALLEL_WORK_MIN {
        return team.simd(Part { product: whole, dots });
    }
    let (extent, by_rows) = if m > n { (m, true) } else { (n, false) };
    // Multiples of a tile's width, so that no tile but the last is cut.
    let per = extent.div_ceil(team.threads).next_multiple_of(if by_rows { 12 } else { 32 });
    team.each_op(extent.div_ceil(per), |i| {
        let range = part(i, per, extent);
        let product = if by_rows { whole.rows(range) } else { whole.columns(range) };
        team.simd(Part { product, dots });
    });
}

impl WithSimd for Part {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Part { product, dots } = self;
        // SAFETY: `matmul` has the operands' shapes and their apartness from its caller.
        unsafe {
            if product.m == 0 || product.n == 0 {
            } else if product.k == 0 {
                product.clear();
            } else if dots {
                product.dots(simd);
            } else {
                BUFFERS.with(|buffers| product.blocks(simd, buffers));
            }
        }
    }
}

impl Product {
    /// The part that makes these rows of c.
    fn rows(&self, range: Range<usize>) -> Product {
        let c = self.c.wrapping_add(range.start * self.c_rs);
        Product { m: range.len(), a: self.a.at(range.start, 0), c, ..*self }
    }

    /// The part that makes these columns of c.
    fn columns(&self, range: Range<usize>) -> Product {
        let c = self.c.wrapping_add(range.start);
        Product { n: range.len(), b: self.b.at(0, range.start), c, ..*self }
    }

    /// The product of no terms.
    ///
    /// # Safety
    /// As [`matmul`].
    unsafe fn clear(self) {
        for i in 0..if self.add { 0 } else { self.m } {
            // SAFETY: row i of c.
            unsafe { self.c.add(i * self.c_rs).write_bytes(0, self.n) };
        }
    }

    /// A few rows of a by many columns of b that lie contiguous: bound by reading b, so each
    /// element of c is a dot product straight from memory.
    ///
    /// # Safety
    /// As [`matmul`]; a's rows and b's columns must be contiguous.
    #[inline(always)]
    unsafe fn dots<S: Simd>(self, simd: S) {
        const COLUMNS: usize = 4;
        let mut j = 0;
        while j < self.n {
            for i in 0..self.m {
                // SAFETY: row i of a and c, columns from j on of b and c.
                unsafe {
                    let a = self.a.at(i, 0).ptr;
                    let c = self.c.add(i * self.c_rs + j);
                    if self.n - j >= COLUMNS {
                        self.dot::<S, COLUMNS>(simd, a, self.b.at(0, j), c);
                    } else {
                        for rest in 0..self.n - j {
                            self.dot::<S, 1>(simd, a, self.b.at(0, j + rest), c.add(rest));
                        }
                    }
                }
            }
            j += COLUMNS;
        }
    }

    /// C neighbouring elements of one row of c. Two partial sums per column hide the latency of the
    /// additions; their number is fixed, so an element's bits do not depend on C.
    ///
    /// # Safety
    /// `a` must be good for k elements, b for k by C, c for C.
    #[inline(always)]
    unsafe fn dot<S: Simd, const C: usize>(self, simd: S, a: *const f32, b: Operand, c: *mut f32) {
        let lanes = S::F32_LANES;
        let mut sums = [[simd.splat_f32s(0.0); 2]; C];
        let whole = self.k / (2 * lanes) * (2 * lanes);
        // SAFETY: vectors below `whole`, then single elements below k.
        unsafe {
            let load = |ptr: *const f32| ptr.cast::<S::f32s>().read_unaligned();
            for p in (0..whole).step_by(2 * lanes) {
                let x = [load(a.add(p)), load(a.add(p + lanes))];
                for j in 0..C {
                    for half in 0..2 {
                        let y = load(b.at(0, j).ptr.add(p + half * lanes));
                        sums[j][half] = simd.mul_add_f32s(x[half], y, sums[j][half]);
                    }
                }
            }
            for j in 0..C {
                let mut sum = simd.reduce_sum_f32s(simd.add_f32s(sums[j][0], sums[j][1]));
                for p in whole..self.k {
                    sum = (*a.add(p)).mul_add(*b.at(0, j).ptr.add(p), sum);
                }
                let to = c.add(j);
                *to = if self.add { *to + sum } else { sum };
            }
        }
    }

    /// The product block by block, with packed operands.
    ///
    /// # Safety
    /// As [`matmul`].
    #[inline(always)]
    unsafe fn blocks<S: Simd>(self, simd: S, buffers: &Buffers) {
        let Product { m, n, k, a, b, .. } = self;
        let (mr, nr) = (tile_rows::<S>(), tile_cols::<S>());
        // With few columns or rows packing the other operand costs more than it saves. A strip of b
        // must be readable in whole vectors, which only its packed form always is.
        let pack_a = n > FEW_COLUMNS;
        let pack_b = m > mr || b.cs != 1 || n % S::F32_LANES != 0;
        for j in (0..n).step_by(N_BLOCK) {
            let cols = N_BLOCK.min(n - j);
            for p in (0..k).step_by(K_BLOCK) {
                let depth = K_BLOCK.min(k - p);
                let b = b.at(p, j);
                if pack_b {
                    // SAFETY: the block lies within b, and fits the buffer.
                    unsafe { pack_right::<S>(simd, b, depth, cols, buffers.b()) };
                }
                for i in (0..m).step_by(M_BLOCK) {
                    let rows = M_BLOCK.min(m - i);
                    let a = a.at(i, p);
                    if pack_a {
                        // SAFETY: the block lies within a, and fits the buffer.
                        unsafe { pack_left(a, rows, depth, mr, buffers.a()) };
                    }
                    for jj in (0..cols).step_by(nr) {
                        let b = if pack_b {
                            Right { ptr: buffers.b().wrapping_add(jj * depth), rs: nr }
                        } else {
                            Right { ptr: b.at(0, jj).ptr, rs: b.rs }
                        };
                        for ii in (0..rows).step_by(mr) {
                            let a = if pack_a {
                                Left { ptr: buffers.a().wrapping_add(ii * depth), rs: 1, cs: mr }
                            } else {
                                Left { ptr: a.at(ii, 0).ptr, rs: a.rs, cs: a.cs }
                            };
                            let c = self.c.wrapping_add((i + ii) * self.c_rs + j + jj);
                            let c = Out { ptr: c, rs: self.c_rs, add: self.add || p > 0 };
                            let shape = (mr.min(rows - ii), nr.min(cols - jj), depth);
                            // SAFETY: a tile within the block; c is apart, as the caller promises.
                            unsafe { strip(simd, shape, a, b, c) };
                        }
                    }
                }
            }
        }
    }
}

/// Packs a block of a as panels of `mr` rows, each k-step's elements next to each other.
///
/// # Safety
/// The block must lie within a, and `to` be good for it, rounded up to whole panels.
#[inline(always)]
unsafe fn pack_left(a: Operand, rows: usize, depth: usize, mr: usize, to: *mut f32) {
    for i in (0..rows).step_by(mr) {
        let width = mr.min(rows - i);
        // SAFETY: one panel of each, as the caller promises.
        unsafe { pack(a.at(i, 0), width, depth, to.add(i * depth), mr) };
    }
}

/// Packs a block of b as panels of a tile's columns, each k-step's elements next to each other.
///
/// # Safety
/// The block must lie within b, and `to` be good for it, rounded up to whole panels.
#[inline(always)]
unsafe fn pack_right<S: Simd>(_: S, b: Operand, depth: usize, cols: usize, to: *mut f32) {
    let nr = tile_cols::<S>();
    let transposed = Operand { ptr: b.ptr, rs: b.cs, cs: b.rs };
    for j in (0..cols).step_by(nr) {
        let width = nr.min(cols - j);
        // SAFETY: one panel of each, as the caller promises.
        unsafe { pack(transposed.at(j, 0), width, depth, to.add(j * depth), nr) };
    }
}

/// `to[p * stride + i] = from(i, p)` for i in `0..width`, p in `0..depth`.
///
/// # Safety
/// `from` and `to` must be good for that.
#[inline(always)]
pub(super) unsafe fn pack(from: Operand, width: usize, depth: usize, to: *mut f32, stride: usize) {
    if from.cs == 1 {
        // SAFETY: as the caller promises.
        return unsafe { simd::transpose(from.ptr, from.rs, width, depth, to, stride) };
    }
    for p in 0..depth {
        let (row, to) = (from.at(0, p).ptr, to.wrapping_add(p * stride));
        // SAFETY: element (i, p) of each.
        unsafe {
            if from.rs == 1 && width == 32 {
                to.copy_from_nonoverlapping(row, 32);
            } else if from.rs == 1 && width == 12 {
                to.copy_from_nonoverlapping(row, 12);
            } else {
                for i in 0..width {
                    *to.add(i) = *row.add(i * from.rs);
                }
            }
        }
    }
}

thread_local! {
    static BUFFERS: Buffers = Buffers::new();
}

/// Makes this thread's buffers now, so that no product does it later.
pub(super) fn prepare_thread() {
    BUFFERS.with(|_| ());
}

/// Where a thread packs its operands, kept until it ends.
struct Buffers {
    ptr: NonNull<f32>,
}

impl Buffers {
    const A_LEN: usize = M_BLOCK * K_BLOCK;
    const B_LEN: usize = N_BLOCK * K_BLOCK;
    const LAYOUT: Layout = match Layout::from_size_align(4 * (Self::A_LEN + Self::B_LEN), 64) {
        Ok(layout) => layout,
        Err(_) => panic!("a size and alignment known when compiling"),
    };

    fn new() -> Buffers {
        // SAFETY: the layout's size is not zero.
        let ptr = unsafe { alloc(Self::LAYOUT) };
        let Some(ptr) = NonNull::new(ptr.cast()) else { handle_alloc_error(Self::LAYOUT) };
        Buffers { ptr }
    }

    const fn a(&self) -> *mut f32 {
        self.ptr.as_ptr()
    }

    const fn b(&self) -> *mut f32 {
        self.ptr.as_ptr().wrapping_add(Self::A_LEN)
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and freed once, here.
        unsafe { dealloc(self.ptr.as_ptr().cast(), Self::LAYOUT) };
    }
}
