//! What collectives cost on a simulated link: bytes of a ring, latencies of a tree; and that those
//! which begin early cost nothing while a rank computes. Sleeping stands for computing, so that the
//! machine's load does not matter much.

mod common;

use std::thread::sleep;
use std::time::{Duration, Instant};

use common::uses::shared;
use common::{PATIENT, WORLDS, regions};
use rotifer_device::{Arena, CpuDevice, Device, Dtype, Purpose, Region};
use rotifer_ring::launch::{self, Link};
use rotifer_ring::schedule::Pass;
use rotifer_ring::{
    Bucket, Comm, Error, Gather, Gathering, HopMode, Parts, Replicas, Result, Spares,
};

const RANKS: usize = 3;
/// Units of a model, of so many bytes each; a gather of one takes [`GATHER`] on the link.
const UNITS: usize = 4;
const UNIT_BYTES: usize = 90_000;
const COMPUTE: Duration = Duration::from_millis(60);
const GATHER: Duration = Duration::from_millis(45);

fn link() -> Link {
    // Two of three parts pass by every rank.
    let bytes_per_sec = (UNIT_BYTES * 2 / 3) as f64 / GATHER.as_secs_f64();
    Link { latency: Duration::ZERO, bytes_per_sec }
}

/// Runs `f` on ranks with a link between them, and returns the longest of what it measures.
fn on_link<T: Send + Ord>(
    ranks: usize,
    link: Link,
    f: impl Fn(&Comm, &dyn Device) -> Result<T> + Sync,
) -> T {
    let options = launch::Options {
        link: Some(link),
        deadline: PATIENT,
        hop_mode: HopMode::Copy,
        ..launch::Options::new(ranks)
    };
    let measured = launch::threads(&options, |comm| f(&comm, &CpuDevice::new(1)));
    measured.expect("ranks that all succeed").into_iter().max().expect("a rank")
}

/// Bytes over the link, and messages that wait for each other.
fn check_cost(
    world: usize,
    rounds: usize,
    bytes: usize,
    run: impl Fn(&Comm, &dyn Device, [Region; 2]) -> Result<()> + Sync,
) {
    let link = Link { latency: Duration::from_micros(700), bytes_per_sec: 1e8 };
    let latencies = link.latency * u32::try_from(rounds).expect("few rounds");
    let cost = Duration::from_secs_f64(bytes as f64 / link.bytes_per_sec) + latencies;
    on_link(world, link, |comm, dev| {
        let [all, mine] = regions(comm, dev, Dtype::F32, [1000 * world, 1000])?;
        let (begin, before) = (Instant::now(), comm.traffic());
        run(comm, dev, [all, mine])?;
        let (took, after) = (begin.elapsed(), comm.traffic());
        let hidden = after.link_hidden - before.link_hidden;
        let exposed = after.link_exposed - before.link_exposed;
        assert_eq!(hidden + exposed, cost, "{world} ranks");
        assert!(took >= cost, "{world} ranks: {took:?} of {cost:?}");
        assert_eq!(after.collectives_bytes - before.collectives_bytes, bytes as u64);
        Ok(())
    });
}

#[test]
fn collectives_cost_the_bytes_of_a_ring_and_the_latencies_of_a_tree() {
    for world in WORLDS {
        let (others, bytes) = (world - 1, 4000 * (world - 1));
        let depth = (0..).find(|depth| 1 << depth >= world).expect("a few levels");
        check_cost(world, depth, bytes, |c, dev, [all, mine]| c.all_gather(dev, mine, all));
        check_cost(world, depth, bytes, |c, dev, [all, mine]| c.reduce_scatter(dev, all, mine));
        check_cost(world, 2 * depth, 2 * bytes, |c, dev, [all, _]| c.all_reduce(dev, all));
        check_cost(world, depth, bytes, |c, dev, [all, _]| c.broadcast(dev, others, all));
    }
}

/// Seconds of a run, and how much of it was waiting for others.
type Took = (Duration, Duration);

fn timed(comm: &Comm, run: impl FnOnce() -> Result<()>) -> Result<Took> {
    comm.barrier()?;
    let (begin, before) = (Instant::now(), comm.traffic().exposed);
    run()?;
    Ok((begin.elapsed(), comm.traffic().exposed - before))
}

/// One forward and one backward pass over units that are gathered, computing three times in each.
fn gathered(overlap: bool) -> Took {
    on_link(RANKS, link(), |comm, dev| {
        let len = UNIT_BYTES / 4;
        let (_arena, (uses, spares)) = shared(comm, dev, |arena: &mut Arena| {
            let uses: Vec<Gather> = (0..UNITS)
                .map(|unit| Gather {
                    unit: unit as u32,
                    parts: Parts::even(RANKS, len / RANKS),
                    weights: arena.take(Purpose::Weights, Dtype::F32, len / RANKS),
                    gradients: arena.take(Purpose::Gradients, Dtype::F32, len / RANKS),
                    kept: None,
                    backward_reads_weights: true,
                })
                .collect();
            let spares = Spares::take(arena, comm, overlap, &uses);
            (uses, spares)
        })?;
        let gathering = Gathering::new(comm.clone(), overlap, spares, uses);
        timed(comm, || {
            for number in 0..UNITS {
                gathering.weights(dev, Pass::Forward, number)?;
                sleep(COMPUTE);
            }
            for number in (0..UNITS).rev() {
                gathering.weights(dev, Pass::Backward, number)?;
                sleep(COMPUTE);
                gathering.gradient(dev, number, |_| sleep(COMPUTE))?;
            }
            gathering.settle(dev)
        })
    })
}

#[test]
fn gathering_ahead_hides_all_but_the_first_and_the_last_3_ranks() {
    let computing = COMPUTE * 3 * UNITS as u32;
    let (blocking, waited) = gathered(false);
    // A gather per unit in forward, one less in backward, and a scatter per unit.
    let collectives = 3 * UNITS as u32 - 1;
    assert!(blocking >= computing + GATHER * collectives, "blocking: {blocking:?}");
    assert!(waited >= GATHER * collectives, "blocking: waited {waited:?}");
    let (overlapped, exposed) = gathered(true);
    assert!(exposed >= GATHER * 2, "nothing hides the first gather and the last scatter");
    assert!(exposed < GATHER * 4, "overlapped: waited {exposed:?}");
    assert!(overlapped < computing + GATHER * 4, "overlapped: {overlapped:?}");
}

/// A backward pass over buckets that are summed.
fn replicated(overlap: bool) -> Took {
    on_link(RANKS, link(), |comm, dev| {
        let (_arena, buckets) = shared(comm, dev, |arena: &mut Arena| {
            let bucket = |unit| Bucket {
                unit,
                gradients: arena.take(Purpose::Gradients, Dtype::F32, UNIT_BYTES / 4),
                shared: None,
                contributions: 1,
            };
            (0..UNITS as u32).map(bucket).collect::<Vec<_>>()
        })?;
        let replicas = Replicas::new(comm.clone(), overlap, buckets);
        timed(comm, || {
            replicas.begin(true);
            for bucket in (0..UNITS).rev() {
                sleep(COMPUTE * 2);
                replicas.contributed(bucket);
            }
            replicas.settle(dev)
        })
    })
}

#[test]
fn sums_in_buckets_hide_behind_backward_3_ranks() {
    // An all-reduce moves what two gathers do.
    let (computing, sum) = (COMPUTE * 2 * UNITS as u32, GATHER * 2);
    let (blocking, waited) = replicated(false);
    assert!(blocking >= computing + sum * UNITS as u32, "blocking: {blocking:?}");
    assert!(waited >= sum * UNITS as u32, "blocking: waited {waited:?}");
    let (overlapped, exposed) = replicated(true);
    assert!(exposed >= sum, "nothing hides the last");
    assert!(exposed < sum * 2, "overlapped: waited {exposed:?}");
    assert!(overlapped < computing + sum * 2, "overlapped: {overlapped:?}");
}

/// As tensor parallelism sums a dx while the gradient of its weights is computed.
#[test]
fn a_sum_beside_work_costs_only_what_outlasts_it_3_ranks() {
    for (work, least) in [(COMPUTE * 3, Duration::ZERO), (COMPUTE, GATHER * 2 - COMPUTE)] {
        let (_, exposed) = on_link(RANKS, link(), |comm, dev| {
            let [x] = regions(comm, dev, Dtype::F32, [UNIT_BYTES / 4])?;
            dev.fill(x, 1.0);
            let took = timed(comm, || comm.all_reduce_beside(dev, None, x, || sleep(work)))?;
            assert_eq!(common::read_f32(dev, x), [3.0; UNIT_BYTES / 4]);
            Ok::<_, Error>(took)
        });
        assert!(exposed >= least && exposed < least + GATHER, "{work:?}: waited {exposed:?}");
    }
}
