//! Saving and loading hold a fixed number of bytes per rank, however large the model is.
//!
//! One test, because it watches the allocator of the whole process.

#![allow(missing_docs, reason = "test names are claims")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{HAND_OVER, on_ranks, options, saves, tiny};
use rotifer::checkpoint::{self, Checkpoint, Disk};
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
    trainer: &mut Trainer<'_, Decoder>,
    f: impl FnOnce(&mut Trainer<'_, Decoder>) -> rotifer::Result<()>,
) -> rotifer::Result<usize> {
    let comm = trainer.comm().clone();
    comm.barrier()?;
    let before = HELD.load(Ordering::SeqCst);
    PEAK.store(before, Ordering::SeqCst);
    comm.barrier()?;
    f(trainer)?;
    comm.barrier()?;
    let peak = PEAK.load(Ordering::SeqCst);
    comm.barrier()?;
    Ok(peak - before)
}

/// Folders whose files claim much and hold little.
fn hostile_files(folder: &Path) -> Vec<PathBuf> {
    let tensor = |rest: &str| format!("{{\"a\":{{\"dtype\":\"F32\",{rest}}}}}");
    let headers = [
        (u64::MAX, String::new()),
        (16 << 20, String::new()),
        (60, tensor("\"shape\":[999999999999],\"data_offsets\":[0,3999999999996]")),
        (3_000_000, tensor(&format!("\"shape\":[{}1]", "1,".repeat(1_400_000)))),
        (1_000_000, "[".repeat(1_000_000)),
    ];
    let write = |(i, (length, text)): (usize, (u64, String))| {
        let folder = folder.join(format!("hostile-{i}"));
        std::fs::create_dir(&folder).expect("a new folder");
        let mut bytes = u64::to_le_bytes(length).to_vec();
        bytes.extend(text.as_bytes());
        bytes.resize(bytes.len().max(3_000_008), b' ');
        std::fs::write(folder.join(checkpoint::WEIGHTS), bytes).expect("a new file");
        folder
    };
    headers.into_iter().enumerate().map(write).collect()
}

#[test]
fn saving_and_loading_hold_a_fixed_number_of_bytes() {
    // 12.7 million parameters, and an MLP whose shard alone is larger than the buffer.
    let spec = Gpt2 { width: 512, heads: 4, layers: 4, mlp_width: 2048, ..tiny() };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let hostile = hostile_files(folder.path());
    for ranks in [1, 2, 3] {
        let sampling = TrainOptions::for_sampling(spec.context);
        let optimizer = options().optimizer;
        let options = TrainOptions { batch: ranks, seq: 2, train: true, optimizer, ..sampling };
        let results = on_ranks(ranks, HAND_OVER.mode, |comm, dev| {
            let mut trainer = Trainer::new(dev, comm, gpt2(&spec), options.clone())?;
            let run = folder.path();
            let save = extra(&mut trainer, |t| checkpoint::save(t, run))?;
            let load = extra(&mut trainer, |t| checkpoint::load(t, run))?;
            let disk = Disk::new();
            let save_step = extra(&mut trainer, |t| saves::save(t, run, &disk, 1))?;
            let restore = extra(&mut trainer, |t| checkpoint::restore(t, &Checkpoint::find(run)?))?;
            let refuse = extra(&mut trainer, |t| {
                for folder in &hostile {
                    checkpoint::load(t, folder).expect_err("a hostile file");
                }
                Ok(())
            })?;
            Ok([save, load, save_step, restore, refuse])
        });
        let file = folder.path().join(checkpoint::WEIGHTS);
        let bytes = std::fs::metadata(file).expect("weights").len() as usize;
        assert!(bytes > 40 * MIB, "{bytes} bytes of weights");
        let whats = ["save", "load", "save a checkpoint", "restore one", "refuse a file"];
        for (what, held) in whats.into_iter().zip(results[0]) {
            let most = ranks * BYTES_PER_RANK_MAX;
            assert!(held <= most, "{ranks} ranks hold {held} bytes to {what}, not {most}");
        }
    }
}
