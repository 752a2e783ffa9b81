//! Over a slow link, overlap hides the hops, and passing in place does not. Sleeping stands for
//! computing, so that the machine's load does not matter much.

use std::thread::sleep;
use std::time::{Duration, Instant};

use rotifer_device::{Arena, CpuDevice, Dtype, Purpose};
use rotifer_ring::launch::{self, Link};
use rotifer_ring::schedule::Cut;
use rotifer_ring::{Error, HopMode, Ring, Shards, Travel, TravelNeed};

const RANKS: usize = 3;
const SHARD_BYTES: usize = 60_000;
const COMPUTE: Duration = Duration::from_millis(60);
const HOP: Duration = Duration::from_millis(45);

/// Seconds of one forward and one backward pass, and how much of it was waiting for others.
fn passes(overlap: bool) -> (Duration, Duration) {
    let latency = Duration::from_millis(1);
    let bytes_per_sec = SHARD_BYTES as f64 / (HOP - latency).as_secs_f64();
    let options = launch::Options {
        hop_mode: HopMode::Copy,
        link: Some(Link { latency, bytes_per_sec }),
        ..launch::Options::new(RANKS)
    };
    let results = launch::threads(&options, |comm| {
        let dev = &CpuDevice::new(1);
        let (rows, len) = (RANKS * SHARD_BYTES / 4, SHARD_BYTES / 4);
        let layout = |arena: &mut Arena| {
            let weights = arena.take(Purpose::Weights, Dtype::F32, len);
            let gradients = arena.take(Purpose::Gradients, Dtype::F32, len);
            let need = TravelNeed { weights: len, gradients: len };
            (weights, gradients, Travel::take(arena, &comm, overlap, need))
        };
        let mut counting = Arena::counting();
        layout(&mut counting);
        let mut arena = Arena::live(dev, &counting.plan()).expect("little memory");
        let (weights, gradients, travel) = layout(&mut arena);
        comm.share(dev, arena.memory().expect("a live arena"))?;
        let cut = Cut::new(rows, RANKS, usize::MAX);
        let (unit, group, width, backward_reads_weights) = (0, 0, 1, true);
        let shards = Shards { unit, cut, group, width, weights, gradients, backward_reads_weights };
        let ring = Ring::new(comm, overlap, travel);
        ring.comm().barrier()?;
        let (begin, before) = (Instant::now(), ring.comm().traffic().exposed);
        ring.forward(dev, &shards, |_, _| sleep(COMPUTE))?;
        ring.backward(dev, &shards, |_, _| sleep(COMPUTE), |_, _, _| sleep(COMPUTE))?;
        let took = begin.elapsed();
        let exposed = ring.comm().traffic().exposed - before;
        ring.settle(dev)?;
        Ok::<_, Error>((took, exposed))
    });
    results.expect("three ranks").into_iter().max().expect("three ranks")
}

#[test]
fn overlap_hides_hops_that_take_less_than_the_product_3_ranks() {
    let computing = COMPUTE * 9;
    let (overlapped, exposed) = passes(true);
    let (in_place, waited) = passes(false);
    // Six hops of weights and three of gradients in place: a circle each, and none is hidden.
    assert!(in_place >= computing + HOP * 9, "in place: {in_place:?}");
    assert!(waited >= HOP * 9, "in place: waited {waited:?}");
    // Weights have a product of their own to hide behind; of the gradients' two hops within the
    // pass the products of the next step hide all.
    assert!(overlapped < computing + HOP * 3, "overlapped: {overlapped:?}");
    assert!(exposed < HOP * 3, "overlapped: waited {exposed:?}");
}
