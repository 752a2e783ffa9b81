//! Neither hops nor collectives allocate, once the ranks have started.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::uses::{FORMS, gathering, replicas};
use common::{MODES, PASSES, on_ranks, regions, start, tag};
use rotifer_device::Dtype;
use rotifer_ring::schedule::Pass;
use rotifer_ring::{HopMode, Lane};

thread_local! {
    static NUM_ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// Counts what each thread asks for.
struct Counting;

// SAFETY: everything is left to the system's allocator; counting touches a thread's own cell, which
// needs no initialiser and no destructor, so it allocates nothing itself.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        NUM_ALLOCATIONS.with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn hops_and_collectives_allocate_nothing_3_ranks() {
    for mode in MODES {
        on_ranks(3, mode, |comm, dev| {
            let [x, spare, all] = regions(comm, dev, Dtype::F32, [64, 64, 192])?;
            let mut allocations = Vec::with_capacity(20);
            for step in 0..20 {
                let before = NUM_ALLOCATIONS.get();
                for pass in PASSES {
                    let into = (mode == HopMode::Copy).then_some(spare);
                    let hop = start(comm, dev, tag(pass, step, Lane::Weights), x, 64, into)?;
                    comm.finish(dev, hop)?;
                }
                comm.all_gather(dev, x, all)?;
                comm.reduce_scatter(dev, all, spare)?;
                comm.all_reduce(dev, x)?;
                comm.broadcast(dev, 1, x)?;
                comm.barrier()?;
                allocations.push(NUM_ALLOCATIONS.get() - before);
            }
            assert_eq!(allocations, [0; 20], "{mode:?}");
            Ok(())
        });
    }
}

/// What data parallelism moves, step after step of two micro-batches.
#[test]
fn replicas_allocate_nothing_3_ranks() {
    for (overlap, is_shared) in [(true, false), (false, false), (true, true), (false, true)] {
        on_ranks(3, HopMode::HandOver, |comm, dev| {
            let (_arena, buckets, replicas) = replicas(comm, dev, overlap, is_shared)?;
            let passes = [false, true].repeat(10);
            let before = NUM_ALLOCATIONS.get();
            for &last in &passes {
                replicas.begin(last);
                for (number, bucket) in buckets.iter().enumerate() {
                    (0..bucket.contributions).for_each(|_| replicas.contributed(number));
                }
                if last {
                    replicas.settle(dev)?;
                    replicas.refresh(dev)?;
                    replicas.clear(dev);
                }
            }
            assert_eq!(NUM_ALLOCATIONS.get(), before, "overlap {overlap}, shared {is_shared}");
            Ok(())
        });
    }
}

/// What fully sharded data parallelism moves, likewise.
#[test]
fn gathering_allocates_nothing_3_ranks() {
    for form in FORMS {
        on_ranks(3, HopMode::Copy, |comm, dev| {
            let (_arena, uses, gathering) = gathering(comm, dev, form)?;
            let before = NUM_ALLOCATIONS.get();
            for _ in 0..10 {
                for _ in 0..2 {
                    (0..uses.len()).try_for_each(|number| {
                        gathering.weights(dev, Pass::Forward, number).map(|_| ())
                    })?;
                    (0..uses.len()).rev().try_for_each(|number| {
                        if uses[number].backward_reads_weights {
                            gathering.weights(dev, Pass::Backward, number)?;
                        }
                        gathering.gradient(dev, number, |all| dev.fill(all, 1.0))
                    })?;
                }
                gathering.refresh(dev)?;
            }
            assert_eq!(NUM_ALLOCATIONS.get(), before, "{form:?}");
            Ok(())
        });
    }
}
