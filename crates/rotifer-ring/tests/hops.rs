//! Hops deliver what was sent, in order, in both modes and directions.

mod common;

use common::{LANES, MODES, PASSES, on_ranks, read_f32, regions, start, tag};
use rotifer_device::{CpuDevice, Dtype, Region};
use rotifer_ring::schedule::{Pass, part};
use rotifer_ring::{Comm, HopMode, Lane};

/// Elements of the unit that goes round: worlds do not divide it, and in the largest some shards
/// are empty.
const ROWS: [usize; 3] = [5, 100, 4099];

fn into(comm: &Comm, spare: Region) -> Option<Region> {
    (comm.hop_mode() == HopMode::Copy).then_some(spare)
}

/// Every rank sees every shard, with its values, at the step that the schedule says.
fn check_round(world: usize) {
    for (mode, pass, rows) in MODES
        .into_iter()
        .flat_map(|m| PASSES.map(|p| (m, p)))
        .flat_map(|(m, p)| ROWS.map(|r| (m, p, r)))
    {
        on_ranks(world, mode, |comm, dev| {
            let len = rows.div_ceil(world);
            let [home, even, odd] = regions(comm, dev, Dtype::F32, [len; 3])?;
            let rank = comm.rank();
            let values = |k| part(rows, world, k).map(|row| row as f32).collect::<Vec<_>>();
            let own = values(rank);
            let mut held = home.first(own.len());
            dev.write_f32(&own, held);
            for step in 0..world {
                let k = pass.shard(rank, step, world);
                assert_eq!(read_f32(dev, held), values(k), "{mode:?} {pass:?} step {step}");
                let next = part(rows, world, pass.shard(rank, step + 1, world)).len();
                let spare = if step % 2 == 0 { even } else { odd };
                let into = into(comm, spare.first(next));
                let hop = start(comm, dev, tag(pass, step, Lane::Weights), held, next, into)?;
                held = comm.finish(dev, hop)?;
            }
            assert_eq!(read_f32(dev, held), own, "a full round ends at home");
            if mode == HopMode::HandOver {
                assert_eq!(held, home.first(own.len()), "and with the region it began with");
            }
            let traffic = comm.traffic();
            assert_eq!((traffic.num_hops, traffic.gradients_bytes), (world as u64, 0));
            assert_eq!(traffic.weights_bytes, 4 * rows as u64);
            Ok(())
        });
    }
}

#[test]
fn hops_go_round_by_the_schedule_1_rank() {
    check_round(1);
}

#[test]
fn hops_go_round_by_the_schedule_2_ranks() {
    check_round(2);
}

#[test]
fn hops_go_round_by_the_schedule_3_ranks() {
    check_round(3);
}

#[test]
fn hops_go_round_by_the_schedule_4_ranks() {
    check_round(4);
}

#[test]
fn hops_go_round_by_the_schedule_7_ranks() {
    check_round(7);
}

/// All channels at once, two messages on each: those of one channel arrive in order, and channels
/// do not wait for each other, whichever is finished first.
fn check_in_flight(world: usize) {
    for mode in MODES {
        on_ranks(world, mode, |comm, dev| {
            let [send, spare] = regions(comm, dev, Dtype::F32, [8, 8])?;
            let rank = comm.rank();
            let values = |rank: usize| (0..8).map(|i| (rank * 10 + i) as f32).collect::<Vec<_>>();
            dev.write_f32(&values(rank), send);
            let channels = PASSES.into_iter().flat_map(|pass| LANES.map(|lane| (pass, lane)));
            for round in 0..50 {
                let mut hops = Vec::new();
                for (i, (pass, lane)) in channels.clone().cycle().take(8).enumerate() {
                    let into = into(comm, spare.slice(i..i + 1));
                    let out = send.slice(i..i + 1);
                    hops.push((i, pass, start(comm, dev, tag(pass, round, lane), out, 1, into)?));
                }
                // Later channels first; within a channel, in the order of starting.
                hops.sort_by_key(|&(i, ..)| (std::cmp::Reverse(i % 4), i));
                for (i, pass, hop) in hops {
                    let arrived = comm.finish(dev, hop)?;
                    let expected = values(pass.from(rank, world))[i];
                    assert_eq!(read_f32(dev, arrived), [expected], "{mode:?} {pass:?} {i}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn two_hops_of_every_channel_are_in_flight_at_once_1_rank() {
    check_in_flight(1);
}

#[test]
fn two_hops_of_every_channel_are_in_flight_at_once_2_ranks() {
    check_in_flight(2);
}

#[test]
fn two_hops_of_every_channel_are_in_flight_at_once_3_ranks() {
    check_in_flight(3);
}

#[test]
fn two_hops_of_every_channel_are_in_flight_at_once_4_ranks() {
    check_in_flight(4);
}

#[test]
fn two_hops_of_every_channel_are_in_flight_at_once_7_ranks() {
    check_in_flight(7);
}

/// The sender may overwrite what it sent as soon as `finish` returns: the neighbour has its copy.
#[test]
fn a_copied_region_is_free_after_finish_3_ranks() {
    on_ranks(3, HopMode::Copy, |comm, dev| {
        let [send, spare] = regions(comm, dev, Dtype::F32, [1000; 2])?;
        let rank = comm.rank();
        for step in 0..200 {
            dev.fill(send, (step * 3 + rank) as f32);
            let tag = tag(Pass::Backward, step, Lane::Gradients);
            let hop = start(comm, dev, tag, send, 1000, Some(spare))?;
            let arrived = comm.finish(dev, hop)?;
            dev.fill(send, -1.0);
            let expected = (step * 3 + (rank + 1) % 3) as f32;
            assert!(read_f32(dev, arrived).iter().all(|&x| x == expected), "step {step}");
        }
        Ok(())
    });
}

#[test]
fn a_rank_alone_gets_back_what_it_sends() {
    let (comm, dev) = (Comm::alone(), &CpuDevice::new(1));
    let [x] = regions(&comm, dev, Dtype::F32, [3]).unwrap();
    let hop = start(&comm, dev, tag(Pass::Forward, 0, Lane::Weights), x, 3, None).unwrap();
    assert_eq!(comm.finish(dev, hop).unwrap(), x);
    assert_eq!((comm.rank(), comm.world(), comm.hop_mode()), (0, 1, HopMode::HandOver));
}
