//! One block of device memory.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

/// Alignment of a memory block and of each region in it: a cache line, and the widest SIMD vector.
pub(crate) const ALIGN: usize = 64;

/// Alignment of a whole block. A page, so that the operating system hands out zeroed pages lazily,
/// and so that a test's counting allocator can tell arenas from everything else.
const BLOCK_ALIGN: usize = 4096;

/// One block of memory, the only one of its rank. Freed when the last device that is attached to it
/// goes; regions name it by number and cannot keep it alive.
#[derive(Debug)]
pub struct Memory {
    id: u32,
    /// `None` if there are no bytes behind it.
    ptr: Option<NonNull<u8>>,
    bytes: usize,
}

// SAFETY: a Memory only names a block. Reading or writing it needs a Region, which is not Send, or
// a transport, whose contract (`Lent::accept`) orders the accesses.
unsafe impl Send for Memory {}
// SAFETY: as above; no method of a shared Memory touches the bytes.
unsafe impl Sync for Memory {}

static NEXT_ID: AtomicU32 = AtomicU32::new(0);

impl Memory {
    /// A zeroed block of host memory.
    ///
    /// # Errors
    /// If the system does not have it.
    pub fn host(bytes: usize) -> Result<Memory, OutOfMemory> {
        let layout = layout(bytes).ok_or(OutOfMemory { bytes })?;
        let ptr = if bytes == 0 {
            NonNull::dangling()
        } else {
            // SAFETY: the layout's size is not zero.
            let ptr = unsafe { alloc_zeroed(layout) };
            NonNull::new(ptr).ok_or(OutOfMemory { bytes })?
        };
        Ok(Memory { id: next_id(), ptr: Some(ptr), bytes })
    }

    /// A block of that size in name only, for a device that touches no bytes.
    pub(crate) fn nominal(bytes: usize) -> Memory {
        Memory { id: next_id(), ptr: None, bytes }
    }

    /// The number by which regions name this block.
    #[must_use]
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// Size of the block.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// # Panics
    /// If the block is one in name only.
    pub(crate) const fn ptr(&self) -> *mut u8 {
        self.ptr.expect("memory with bytes").as_ptr()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let layout = layout(self.bytes).filter(|_| self.bytes > 0);
        if let (Some(layout), Some(ptr)) = (layout, self.ptr) {
            // SAFETY: allocated in `host` with this very layout, and freed once, here.
            unsafe { dealloc(ptr.as_ptr(), layout) }
        }
    }
}

fn next_id() -> u32 {
    let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    assert!(id < u32::MAX, "more than 2^32 memory blocks in one process");
    id
}

/// `None` for more bytes than an address space has.
fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes, BLOCK_ALIGN).ok()
}

/// A device does not have the memory that a rank asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a rank needs {bytes} bytes, which this machine does not have; more ranks on more machines, a \
     smaller batch, more accumulation or a smaller model need less"
)]
pub struct OutOfMemory {
    /// What was asked for.
    pub bytes: usize,
}
