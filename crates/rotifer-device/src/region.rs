//! Handles to parts of an arena.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

/// The type of a region's elements. Part of every region from the start, so that mixed precision
/// does not have to change a single signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// 32-bit IEEE float: weights, gradients, activations.
    F32,
    /// The upper half of an `F32`. Kernels do not compute in it yet.
    Bf16,
    /// 32-bit signed integer: token ids, positions, document numbers.
    I32,
    /// 64-bit IEEE float: sums that are read back, such as the loss and the gradient norm.
    F64,
}

impl Dtype {
    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::Bf16 => 2,
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::F64 => 8,
        }
    }
}

/// What memory is for. Every byte of an arena has exactly one purpose, so a report adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Purpose {
    /// This rank's shards of the weights, and the small replicated ones.
    Weights,
    /// Gradients of those weights.
    Gradients,
    /// Optimiser state: AdamW's two moments, SGD's momentum.
    Optimizer,
    /// What forward keeps for backward, and the step's inputs.
    Activations,
    /// Spare buffers that shards travel through.
    Travel,
    /// Space that lives no longer than one call of one layer; shared by all of them.
    Scratch,
}

impl Purpose {
    /// All purposes, in the order in which reports list them.
    pub const ALL: [Purpose; 6] = [
        Purpose::Weights,
        Purpose::Gradients,
        Purpose::Optimizer,
        Purpose::Activations,
        Purpose::Travel,
        Purpose::Scratch,
    ];

    /// The name used in reports and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Purpose::Weights => "weights",
            Purpose::Gradients => "gradients",
            Purpose::Optimizer => "optimizer",
            Purpose::Activations => "activations",
            Purpose::Travel => "travel",
            Purpose::Scratch => "scratch",
        }
    }
}

/// A run of elements in one [`Memory`](crate::Memory): a handle of a few words, copied freely.
///
/// A region is not `Send`: within one thread kernels run one after the other, so safe code cannot
/// make two of them touch the same bytes at once. Only a transport moves a region to another rank's
/// thread, through [`lend`](Region::lend) and [`Lent::accept`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Region {
    pub(crate) memory: u32,
    /// In bytes from the start of the memory.
    pub(crate) offset: usize,
    /// In elements.
    pub(crate) len: usize,
    pub(crate) dtype: Dtype,
    not_send: PhantomData<*const ()>,
}

impl Region {
    pub(crate) const fn new(memory: u32, offset: usize, len: usize, dtype: Dtype) -> Region {
        Region { memory, offset, len, dtype, not_send: PhantomData }
    }

    /// A region of no elements, for parts that do not exist (such as the bias of a layer without).
    #[must_use]
    pub const fn empty(dtype: Dtype) -> Region {
        Region::new(u32::MAX, 0, 0, dtype)
    }

    /// Number of elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Type of the elements.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Size in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.len * self.dtype.bytes()
    }

    /// The part `range`, counted in elements.
    ///
    /// # Panics
    /// If the range does not lie within the region.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Region {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} is not within a region of {} elements",
            self.len
        );
        let offset = self.offset + range.start * self.dtype.bytes();
        Region::new(self.memory, offset, range.end - range.start, self.dtype)
    }

    /// The first `len` elements.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    pub fn first(&self, len: usize) -> Region {
        self.slice(0..len)
    }

    /// The same bytes read as another type of the same size: a travel buffer carries floats and
    /// ids.
    ///
    /// # Panics
    /// If the sizes of the types differ.
    #[must_use]
    pub fn cast(&self, dtype: Dtype) -> Region {
        assert!(dtype.bytes() == self.dtype.bytes(), "{:?} as {dtype:?}", self.dtype);
        Region { dtype, ..*self }
    }

    /// Whether the two share a byte.
    #[must_use]
    pub const fn overlaps(&self, other: &Region) -> bool {
        self.len > 0
            && other.len > 0
            && self.memory == other.memory
            && self.offset < other.offset + other.bytes()
            && other.offset < self.offset + self.bytes()
    }

    /// A form of the handle that may cross threads. Only transports need it.
    #[must_use]
    pub const fn lend(self) -> Lent {
        Lent { memory: self.memory, offset: self.offset, len: self.len, dtype: self.dtype }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}[{}] at {}+{}", self.dtype, self.len, self.memory, self.offset)
    }
}

/// A region on its way to another thread; see [`Region::lend`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lent {
    memory: u32,
    offset: usize,
    len: usize,
    dtype: Dtype,
}

impl Lent {
    /// Size in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.len * self.dtype.bytes()
    }

    /// The handle again, in the thread that received it.
    ///
    /// # Safety
    /// From now until the region goes back, its lender must not write to it, and must not read it
    /// either if the receiver writes. Something must order the lender's accesses before the
    /// receiver's (a lock or a channel that carried the message does).
    #[must_use]
    pub const unsafe fn accept(self) -> Region {
        Region::new(self.memory, self.offset, self.len, self.dtype)
    }
}
