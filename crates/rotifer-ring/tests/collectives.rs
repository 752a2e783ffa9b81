//! Collectives give every rank the same bits: those of a sum in the order of ranks.

mod common;

use common::{noise, on_ranks, read_f32, read_f64, regions};
use rotifer_device::Dtype;
use rotifer_ring::HopMode;

/// None, fewer than ranks, and more.
const LENS: [usize; 4] = [0, 1, 5, 1001];

fn check_all_reduce(world: usize) {
    for len in LENS {
        let sum = |i| (1..world).fold(noise(0, i), |sum, rank| sum + noise(rank, i));
        let sum_f32 =
            |i| (1..world).fold(noise(0, i) as f32, |sum, rank| sum + noise(rank, i) as f32);
        on_ranks(world, HopMode::HandOver, |comm, dev| {
            let [x] = regions(comm, dev, Dtype::F64, [len])?;
            let [y] = regions(comm, dev, Dtype::F32, [len])?;
            let own: Vec<f64> = (0..len).map(|i| noise(comm.rank(), i)).collect();
            let own_f32: Vec<f32> = own.iter().map(|&v| v as f32).collect();
            dev.write_f64(&own, x);
            dev.write_f32(&own_f32, y);
            comm.all_reduce(dev, x)?;
            comm.all_reduce(dev, y)?;
            assert!(read_f64(dev, x).into_iter().eq((0..len).map(sum)));
            assert!(read_f32(dev, y).into_iter().eq((0..len).map(sum_f32)));
            Ok(())
        });
    }
}

#[test]
fn all_reduce_sums_in_the_order_of_ranks_1_rank() {
    check_all_reduce(1);
}

#[test]
fn all_reduce_sums_in_the_order_of_ranks_2_ranks() {
    check_all_reduce(2);
}

#[test]
fn all_reduce_sums_in_the_order_of_ranks_3_ranks() {
    check_all_reduce(3);
}

#[test]
fn all_reduce_sums_in_the_order_of_ranks_4_ranks() {
    check_all_reduce(4);
}

#[test]
fn all_reduce_sums_in_the_order_of_ranks_7_ranks() {
    check_all_reduce(7);
}

/// Gather is tested in place and elsewhere; scattering a gathered region must add the same bits as
/// reducing it.
fn check_parts(world: usize) {
    for len in LENS {
        on_ranks(world, HopMode::HandOver, |comm, dev| {
            let rank = comm.rank();
            let sizes = [len, world * len, world * len, len];
            let [mine, all, all_in_place, part] = regions(comm, dev, Dtype::F32, sizes)?;
            let values = |rank: usize| (0..len).map(move |i| noise(rank, i) as f32);
            let own: Vec<f32> = values(rank).collect();
            let in_place = all_in_place.slice(rank * len..(rank + 1) * len);
            dev.write_f32(&own, mine);
            dev.write_f32(&own, in_place);
            comm.all_gather(dev, mine, all)?;
            comm.all_gather(dev, in_place, all_in_place)?;
            let gathered: Vec<f32> = (0..world).flat_map(values).collect();
            assert_eq!(read_f32(dev, all), gathered);
            assert_eq!(read_f32(dev, all_in_place), gathered);

            // Now every rank has its own addend for every part.
            let addend = |rank: usize, i: usize| noise(rank, i + 7) as f32;
            let addends: Vec<f32> = (0..world * len).map(|i| addend(rank, i)).collect();
            dev.write_f32(&addends, all);
            comm.reduce_scatter(dev, all, part)?;
            let sum = |i| (1..world).fold(addend(0, i), |sum, rank| sum + addend(rank, i));
            let scattered = read_f32(dev, part);
            assert!(scattered.into_iter().eq((rank * len..(rank + 1) * len).map(sum)));
            assert_eq!(read_f32(dev, all), addends, "what is scattered stays as it was");
            Ok(())
        });
    }
}

#[test]
fn all_gather_and_reduce_scatter_know_each_part_1_rank() {
    check_parts(1);
}

#[test]
fn all_gather_and_reduce_scatter_know_each_part_2_ranks() {
    check_parts(2);
}

#[test]
fn all_gather_and_reduce_scatter_know_each_part_3_ranks() {
    check_parts(3);
}

#[test]
fn all_gather_and_reduce_scatter_know_each_part_4_ranks() {
    check_parts(4);
}

#[test]
fn all_gather_and_reduce_scatter_know_each_part_7_ranks() {
    check_parts(7);
}

fn check_broadcast(world: usize) {
    on_ranks(world, HopMode::Copy, |comm, dev| {
        let [x] = regions(comm, dev, Dtype::F32, [17])?;
        for root in 0..world {
            dev.fill(x, comm.rank() as f32);
            comm.broadcast(dev, root, x)?;
            assert_eq!(read_f32(dev, x), [root as f32; 17]);
            comm.barrier()?;
        }
        Ok(())
    });
}

#[test]
fn broadcast_gives_all_the_roots_region_1_rank() {
    check_broadcast(1);
}

#[test]
fn broadcast_gives_all_the_roots_region_2_ranks() {
    check_broadcast(2);
}

#[test]
fn broadcast_gives_all_the_roots_region_3_ranks() {
    check_broadcast(3);
}

#[test]
fn broadcast_gives_all_the_roots_region_4_ranks() {
    check_broadcast(4);
}

#[test]
fn broadcast_gives_all_the_roots_region_7_ranks() {
    check_broadcast(7);
}

/// A region is the caller's again when a collective returns: writing to it at once disturbs nobody.
#[test]
fn regions_are_free_when_a_collective_returns_7_ranks() {
    on_ranks(7, HopMode::HandOver, |comm, dev| {
        let [x, all, mine] = regions(comm, dev, Dtype::F32, [300, 700, 100])?;
        for round in 0..100 {
            let value = (round + comm.rank()) as f32;
            dev.fill(x, value);
            dev.fill(all, value);
            comm.all_reduce(dev, x)?;
            let sum = (7 * round + 21) as f32;
            assert_eq!(read_f32(dev, x), [sum; 300]);
            dev.fill(x, -1.0);
            comm.reduce_scatter(dev, all, mine)?;
            dev.fill(all, -1.0);
            assert_eq!(read_f32(dev, mine), [sum; 100]);
        }
        Ok(())
    });
}
