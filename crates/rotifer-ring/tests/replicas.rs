//! Replicas: gradients become sums in the order of ranks, whenever they travel and whoever shares
//! the optimiser's work.

mod common;

use std::thread::sleep;
use std::time::{Duration, Instant};

use common::uses::{UNITS, part_of, parts, replicas};
use common::{MODES, PATIENT, WORLDS, failure, noise_f32, on_ranks, on_ranks_within, sum_of};
use rotifer_device::Device;
use rotifer_ring::{Bucket, Comm, HopMode, Replicas, Result};

/// Contributions of one backward pass, from the last bucket to the first, twice each.
fn backward(dev: &dyn Device, replicas: &Replicas, buckets: &[Bucket], rank: usize, last: bool) {
    replicas.begin(last);
    for (unit, bucket) in buckets.iter().enumerate().rev() {
        let values = noise_f32(rank + 10 * unit, bucket.gradients.len());
        if bucket.contributions > 0 {
            replicas.contributed(unit);
            dev.write_f32(&values, bucket.gradients);
            replicas.contributed(unit);
        } else {
            dev.write_f32(&values, bucket.gradients);
        }
    }
}

/// Three steps of two micro-batches.
fn check_sums(world: usize, overlap: bool, is_shared: bool) {
    let what = format!("{world} ranks, overlap {overlap}, shared {is_shared}");
    on_ranks(world, MODES[world % 2], |comm, dev| {
        let (_arena, buckets, replicas) = replicas(comm, dev, overlap, is_shared)?;
        let rank = comm.rank();
        for step in 0..3 {
            let seed = |rank| rank + 1000 * step;
            replicas.clear(dev);
            backward(dev, &replicas, &buckets, seed(rank), false);
            assert_eq!(comm.traffic().collectives_bytes, expected_bytes(world, step, is_shared));
            backward(dev, &replicas, &buckets, seed(rank), true);
            replicas.settle(dev)?;
            for (unit, bucket) in buckets.iter().enumerate() {
                let len = bucket.gradients.len();
                let sum = sum_of(world, |rank| noise_f32(seed(rank) + 10 * unit, len));
                let got = common::read_f32(dev, bucket.gradients);
                if is_shared {
                    let parts = parts(unit, world);
                    let of = |whole: &[f32]| part_of(&parts, rank, whole);
                    assert_eq!(of(&got), of(&sum), "{what}, bucket {unit}");
                } else {
                    assert_eq!(got, sum, "{what}, bucket {unit}");
                }
            }
            check_refresh(comm, dev, &replicas, &buckets, step)?;
        }
        Ok(())
    });
}

/// Bytes that a rank has sent in `steps` steps: nothing before the last micro-batch.
fn expected_bytes(world: usize, steps: usize, is_shared: bool) -> u64 {
    let lens = (0..UNITS.len()).map(|unit| 4 * parts(unit, world).len());
    let half = |bytes: usize| ((world - 1) * bytes / world) as u64;
    let of = |bytes| if is_shared { 2 * half(bytes) } else { half(2 * bytes) };
    lens.map(of).sum::<u64>() * steps as u64
}

/// Every rank changes its own part of the weights, and then has all of them.
fn check_refresh(
    comm: &Comm,
    dev: &dyn Device,
    replicas: &Replicas,
    buckets: &[Bucket],
    step: usize,
) -> Result<()> {
    for bucket in buckets {
        let Some((parts, weights)) = &bucket.shared else { continue };
        let all = noise_f32(step, parts.len());
        dev.fill(*weights, -1.0);
        for (whole, _) in parts.segments(comm.rank()).filter(|(whole, _)| !whole.is_empty()) {
            dev.write_f32(&all[whole.clone()], weights.slice(whole));
        }
    }
    replicas.refresh(dev)?;
    for bucket in buckets {
        if let Some((parts, weights)) = &bucket.shared {
            assert_eq!(common::read_f32(dev, *weights), noise_f32(step, parts.len()));
        }
    }
    Ok(())
}

#[test]
fn gradients_become_sums_in_the_order_of_ranks() {
    for world in WORLDS {
        for (overlap, is_shared) in [(true, false), (false, false), (true, true), (false, true)] {
            check_sums(world, overlap, is_shared);
        }
    }
}

/// Settling after a pass that was not said to be the last sums all the same.
#[test]
fn no_gradient_is_left_without_its_sum_3_ranks() {
    on_ranks(3, HopMode::HandOver, |comm, dev| {
        let (_arena, buckets, replicas) = replicas(comm, dev, true, false)?;
        backward(dev, &replicas, &buckets, comm.rank(), false);
        replicas.settle(dev)?;
        let sum = sum_of(3, |rank| noise_f32(rank, buckets[0].gradients.len()));
        assert_eq!(common::read_f32(dev, buckets[0].gradients), sum);
        Ok(())
    });
}

#[test]
fn one_contribution_too_many_is_refused() {
    let failed = on_ranks_within(PATIENT, 1, HopMode::HandOver, |comm, dev| {
        let (_arena, buckets, replicas) = replicas(comm, dev, true, false)?;
        backward(dev, &replicas, &buckets, 0, true);
        replicas.contributed(1);
        Ok(())
    });
    let says = failed.expect_err("a panic").to_string();
    assert_eq!(says, "rank 0 panicked: bucket 1 is complete already");
}

/// Buckets that become complete in another order on one rank are not added to each other.
#[test]
fn another_order_of_buckets_is_a_mismatch_3_ranks() {
    let (rank, cause) = failure(PATIENT, 3, HopMode::HandOver, |comm, dev| {
        let (_arena, _, replicas) = replicas(comm, dev, true, false)?;
        replicas.begin(true);
        let order = if comm.rank() == 1 { [0, 2] } else { [2, 0] };
        for bucket in order.into_iter().flat_map(|bucket| [bucket; 2]) {
            replicas.contributed(bucket);
        }
        replicas.settle(dev)
    });
    let place = |unit| format!("at unit {unit}, backward all-reduce, sequence 2");
    let [own, other] = if rank == 1 { ["wte", "h.0.mlp"] } else { ["h.0.mlp", "wte"] };
    let says = cause.starts_with(&format!("out of step: this rank is {}", place(own)));
    assert!(says && cause.ends_with(&place(other)), "rank {rank}: {cause}");
}

#[test]
fn a_bucket_of_another_size_is_named_4_ranks() {
    let (rank, cause) = failure(PATIENT, 4, HopMode::HandOver, |comm, dev| {
        let (_arena, mut buckets, _) = replicas(comm, dev, true, false)?;
        if comm.rank() == 2 {
            buckets[0].gradients = buckets[0].gradients.first(17);
        }
        let replicas = Replicas::new(comm.clone(), true, buckets.clone());
        backward(dev, &replicas, &buckets, comm.rank(), true);
        replicas.settle(dev)
    });
    let (found, sent, expects) = if rank == 2 { (0, 720, 68) } else { (2, 68, 720) };
    let says = format!(
        "sizes differ: rank {found} sent {sent} bytes, this rank expects {expects}: unit wte, \
         backward all-reduce, sequence "
    );
    assert!(cause.starts_with(&says), "rank {rank}: {cause}");
}

/// A rank that fails with sums begun and not waited for ends the others at once; so does one that
/// is silent, at the deadline, by its name.
#[test]
fn a_rank_that_never_settles_is_named_4_ranks() {
    let begin = Instant::now();
    let deadline = Duration::from_millis(300);
    for is_shared in [false, true] {
        let (_, cause) = failure(deadline, 4, HopMode::Copy, |comm, dev| {
            let (_arena, buckets, replicas) = replicas(comm, dev, true, is_shared)?;
            backward(dev, &replicas, &buckets, comm.rank(), true);
            if comm.rank() == 2 {
                sleep(3 * deadline);
                return Ok(());
            }
            replicas.settle(dev)
        });
        let kind = if is_shared { "reduce-scatter" } else { "all-reduce" };
        let says = format!("rank 2 is silent: unit h.0.mlp, backward {kind}, sequence 2, after");
        assert!(cause.starts_with(&says), "{cause}");
        let ended = on_ranks_within(PATIENT, 4, HopMode::Copy, |comm, dev| {
            let (_arena, buckets, replicas) = replicas(comm, dev, true, is_shared)?;
            backward(dev, &replicas, &buckets, comm.rank(), true);
            assert!(comm.rank() != 3, "planted");
            replicas.settle(dev)
        });
        let failure = ended.expect_err("a rank that panics").to_string();
        assert_eq!(failure, "rank 3 panicked: planted");
    }
    assert!(begin.elapsed() < PATIENT / 2, "nobody waits for the deadline");
}
