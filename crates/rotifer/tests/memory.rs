//! Memory is decided before the first step: the plan is the peak, to the byte, and from step 2 on
//! nothing is allocated.
//!
//! One test, because it watches the allocator of the whole process.

#![allow(missing_docs, reason = "test names are claims")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{ALL_HOPS, Tokens, on_ranks, options, tiny};
use rotifer::layers::{Hidden, Logits};
use rotifer::models::{Gpt2, gpt2};
use rotifer::strategy::Strategy;
use rotifer::train::{TrainOptions, Trainer};

/// Counts. Arenas are the only blocks that are aligned to a page.
struct Counting;

const ARENA_ALIGN: usize = 4096;

static ARENA_BYTES: AtomicUsize = AtomicUsize::new(0);
static ARENA_PEAK: AtomicUsize = AtomicUsize::new(0);
/// Of the whole process: arenas, buffers of kernels, structure, the test itself.
static ALL_BYTES: AtomicUsize = AtomicUsize::new(0);
static ALL_PEAK: AtomicUsize = AtomicUsize::new(0);
static ALL_ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Allocations of this thread: the threads of the test harness have their own.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

fn taken(layout: Layout) {
    ALLOCATIONS.set(ALLOCATIONS.get() + 1);
    ALL_ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
    let now = ALL_BYTES.fetch_add(layout.size(), Ordering::SeqCst) + layout.size();
    ALL_PEAK.fetch_max(now, Ordering::SeqCst);
    if layout.align() >= ARENA_ALIGN {
        let now = ARENA_BYTES.fetch_add(layout.size(), Ordering::SeqCst) + layout.size();
        ARENA_PEAK.fetch_max(now, Ordering::SeqCst);
    }
}

fn given_back(layout: Layout) {
    ALL_BYTES.fetch_sub(layout.size(), Ordering::SeqCst);
    if layout.align() >= ARENA_ALIGN {
        ARENA_BYTES.fetch_sub(layout.size(), Ordering::SeqCst);
    }
}

// SAFETY: every call goes to the system's allocator unchanged; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        taken(layout);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        taken(layout);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        given_back(layout);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        given_back(layout);
        taken(Layout::from_size_align(size, layout.align()).expect("a layout that was valid"));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn the_plan_is_the_peak_and_steps_allocate_nothing() {
    let other =
        Gpt2 { mlp_hidden: Hidden::Recomputed, logits: Logits::Kept, tied: false, ..tiny() };
    for spec in [tiny(), other] {
        let tensor_parallel = [common::TP, common::TP_BLOCKING];
        for hops in ALL_HOPS.into_iter().chain(common::DATA_PARALLEL).chain(tensor_parallel) {
            // As many heads as tiny has.
            let whole_heads = hops.strategy == Strategy::Tp;
            let worlds = if whole_heads { &[1, 5][..] } else { &common::WORLDS };
            for &ranks in worlds {
                for accumulation in [1, 3] {
                    let options = TrainOptions { accumulation, ..hops.with(&options()) };
                    watch(&format!("{ranks} ranks, {hops:?}"), ranks, hops, &spec, &options);
                }
            }
        }
    }
    accumulation_costs_no_byte();
    kernel_threads_allocate_nothing();
}

/// What a rank may have outside of its arena: the packing buffers of its products (1.25 MiB), the
/// token ids of one micro-batch, names and handles of a model of this size.
const OUTSIDE_THE_ARENA: usize = (1280 + 256) << 10;

fn watch(what: &str, ranks: usize, hops: common::Hops, spec: &Gpt2, options: &TrainOptions) {
    let tokens = Tokens { vocab_size: spec.vocab_size, seq: options.seq };
    let batch = options.batch as u64;
    ARENA_PEAK.store(ARENA_BYTES.load(Ordering::SeqCst), Ordering::SeqCst);
    ALL_PEAK.store(ALL_BYTES.load(Ordering::SeqCst), Ordering::SeqCst);
    let before = ARENA_BYTES.load(Ordering::SeqCst);
    let all_before = ALL_BYTES.load(Ordering::SeqCst);
    let plans = on_ranks(ranks, hops.mode, |comm, dev| {
        let mut trainer = Trainer::new(dev, comm, gpt2(spec), options.clone())?;
        // The first step may fill gemm's packing buffers.
        trainer.step(&tokens, 0, false)?;
        trainer.evaluate(&tokens, 3)?;
        let before = ALLOCATIONS.get();
        for step in 1..4 {
            trainer.step(&tokens, step * batch, false)?;
        }
        trainer.evaluate(&tokens, batch + 2)?;
        assert_eq!(ALLOCATIONS.get() - before, 0, "{what}: allocations from step 2 on");
        Ok(trainer.plan().total())
    });
    let peak = ARENA_PEAK.load(Ordering::SeqCst) - before;
    assert_eq!(peak, plans.iter().sum::<usize>(), "{what}: the peak is the plan");
    let all = ALL_PEAK.load(Ordering::SeqCst) - all_before;
    let most = peak + ranks * OUTSIDE_THE_ARENA;
    assert!(all <= most, "{what}: {all} bytes in all, {peak} of them in arenas");
    assert_eq!(ARENA_BYTES.load(Ordering::SeqCst), before, "{what}: all is given back");
    assert!(plans.iter().all(|p| *p == plans[0]), "{what}: all ranks need the same");
}

/// With a pool of kernel threads, which this test's other threads cannot be told from: so they
/// sleep, and of three tries the best counts.
fn kernel_threads_allocate_nothing() {
    let (spec, options) = (tiny(), options());
    let tokens = Tokens { vocab_size: spec.vocab_size, seq: options.seq };
    let fewest = rotifer_device::CpuDevice::run(3, |dev| {
        let comm = rotifer_ring::Comm::alone();
        let mut trainer = Trainer::new(dev, comm, gpt2(&spec), options.clone()).expect("a model");
        let mut step = |i: u64| {
            trainer.step(&tokens, 7 * i, false).expect("a step");
        };
        // Each thread makes its packing buffers at its first product, whenever that is.
        (0..30).for_each(&mut step);
        let mut tries = (0..3).map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(20));
            let before = ALL_ALLOCATIONS.load(Ordering::SeqCst);
            (0..3).for_each(&mut step);
            ALL_ALLOCATIONS.load(Ordering::SeqCst) - before
        });
        tries.by_ref().min()
    });
    assert_eq!(fewest.expect("threads"), Some(0), "allocations with three threads");
}

fn accumulation_costs_no_byte() {
    let bytes = |batch, accumulation| {
        let options = TrainOptions { batch, accumulation, ..options() };
        let comm = rotifer_ring::Comm::alone();
        rotifer::train::plan(&mut gpt2(&tiny()), &comm, &options).expect("a plan").total()
    };
    assert_eq!(bytes(3, 1), bytes(12, 4), "a larger batch in more micro-batches");
}
