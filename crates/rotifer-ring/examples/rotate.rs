//! The ring alone: four ranks, one vector each, and every rank sees every vector once, without any
//! rank ever holding more than its own and the one at hand. Then the way back, on which every rank
//! adds to each vector's gradient, and the sums end at home.
//!
//!     cargo run --release -p rotifer-ring --example rotate

use std::time::Duration;

use rotifer_device::{Arena, CpuDevice, Device, Dtype, Purpose};
use rotifer_ring::schedule::Cut;
use rotifer_ring::{Error, HopMode, Ring, Shards, Travel, TravelNeed, launch};

const RANKS: usize = 4;
const ROWS: usize = 10; // Nothing need divide.

fn main() {
    // Copy, as a network would; HandOver moves handles instead.
    let deadline = Duration::from_secs(5);
    let options = launch::Options {
        ranks: RANKS,
        hop_mode: HopMode::Copy,
        deadline,
        ..launch::Options::new(RANKS)
    };
    let reports = launch::threads(&options, |comm| {
        let dev = &CpuDevice::new(1);
        let cut = Cut::new(ROWS, RANKS, usize::MAX);
        let len = cut.shard_rows_max();
        // Memory is decided first: one pass that counts, one that is live.
        let layout = |arena: &mut Arena| {
            let weights = arena.take(Purpose::Weights, Dtype::F32, len);
            let gradients = arena.take(Purpose::Gradients, Dtype::F32, len);
            let need = TravelNeed { weights: len, gradients: len };
            (weights, gradients, Travel::take(arena, &comm, true, need))
        };
        let mut counting = Arena::counting();
        layout(&mut counting);
        let mut arena = Arena::live(dev, &counting.plan()).expect("little memory");
        let (weights, gradients, travel) = layout(&mut arena);
        comm.share(dev, arena.memory().expect("a live arena has memory"))?;

        let (unit, group, width) = (0, 0, 1);
        let backward_reads_weights = true;
        let shards = Shards { unit, cut, group, width, weights, gradients, backward_reads_weights };
        let home = cut.shard(0, comm.rank());
        let own: Vec<f32> = home.clone().map(|row| row as f32).collect();
        dev.write_f32(&own, weights.first(own.len()));

        let rank = comm.rank();
        let ring = Ring::new(comm, true, travel);
        let mut seen = Vec::new();
        ring.forward(dev, &shards, |shard, weights| {
            let mut values = vec![0.0; weights.len()];
            dev.read_f32(weights, &mut values);
            seen.push((shard, values));
        })?;
        ring.backward(dev, &shards, |_, _| (), |_, w, dw| dev.add(w, dw))?;
        ring.settle(dev)?;
        let mut sums = vec![0.0; home.len()];
        dev.read_f32(gradients.first(home.len()), &mut sums);
        Ok::<_, Error>((rank, seen, sums))
    });
    for (rank, seen, sums) in reports.expect("four threads of one process reach each other") {
        println!("rank {rank} saw {seen:?}");
        println!("       its gradient, summed over {RANKS} ranks: {sums:?}");
    }
}
