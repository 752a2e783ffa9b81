//! Saving and loading hold a fixed number of bytes per rank, however large the model is.
//!
//! One test, because it watches the allocator of the whole process.

#![allow(missing_docs, reason = "test names are claims")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{HAND_OVER, on_ranks, tiny};
use rotifer::checkpoint;
use rotifer::models::{Decoder, Gpt2, gpt2};
use rotifer::train::{TrainOptions, Trainer};

/// Counts the bytes that are held, and the most there were.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn taken(bytes: usize) {
    let now = HELD.fetch_add(bytes, Ordering::SeqCst) + bytes;
    PEAK.fetch_max(now, Ordering::SeqCst);
}

fn given_back(bytes: usize) {
    HELD.fetch_sub(bytes, Ordering::SeqCst);
}

// SAFETY: every call goes to the system's allocator unchanged; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        taken(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        taken(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        given_back(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // An old and a new block at once, as when the block has to move.
        taken(size);
        // SAFETY: the caller's promise is passed on.
        let new = unsafe { System.realloc(ptr, layout, size) };
        given_back(layout.size());
        new
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const MIB: usize = 1 << 20;

/// The buffer of 4 MiB, and room for names and the header.
const BYTES_PER_RANK_MAX: usize = 4 * MIB + MIB / 4;

/// The most bytes that all ranks together hold during `f`, beyond those that they held before.
fn extra(
    trainer: &Trainer<'_, Decoder>,
    f: impl FnOnce() -> rotifer::Result<()>,
) -> rotifer::Result<usize> {
    let comm = trainer.comm();
    comm.barrier()?;
    let before = HELD.load(Ordering::SeqCst);
    PEAK.store(before, Ordering::SeqCst);
    comm.barrier()?;
    f()?;
    comm.barrier()?;
    let peak = PEAK.load(Ordering::SeqCst);
    comm.barrier()?;
    Ok(peak - before)
}

#[test]
fn saving_and_loading_hold_a_fixed_number_of_bytes() {
    // 12.7 million parameters, and an MLP whose shard alone is larger than the buffer.
    let spec = Gpt2 { width: 512, heads: 4, layers: 4, mlp_width: 2048, ..tiny() };
    let folder = tempfile::tempdir().expect("a temporary folder");
    for ranks in [1, 2, 3] {
        let options = TrainOptions { batch: ranks, ..TrainOptions::for_sampling(spec.context) };
        let results = on_ranks(ranks, HAND_OVER.mode, |comm, dev| {
            let trainer = Trainer::new(dev, comm, gpt2(&spec), options.clone())?;
            let save = extra(&trainer, || checkpoint::save(&trainer, folder.path()))?;
            let load = extra(&trainer, || checkpoint::load(&trainer, folder.path()))?;
            Ok([save, load])
        });
        let file = folder.path().join(checkpoint::WEIGHTS);
        let bytes = std::fs::metadata(file).expect("weights").len() as usize;
        assert!(bytes > 40 * MIB, "{bytes} bytes of weights");
        for (what, held) in ["save", "load"].into_iter().zip(results[0]) {
            let most = ranks * BYTES_PER_RANK_MAX;
            assert!(held <= most, "{ranks} ranks hold {held} bytes to {what}, not {most}");
        }
    }
}
