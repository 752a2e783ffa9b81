//! The schedule's promises, one by one, for every world up to 64.

use proptest::prelude::*;
use rotifer_ring::schedule::{Cut, Pass, part};

const WORLDS: std::ops::RangeInclusive<usize> = 1..=64;
const PASSES: [Pass; 2] = [Pass::Forward, Pass::Backward];

#[test]
fn every_rank_sees_every_shard_once() {
    for world in WORLDS {
        for (pass, rank) in PASSES.into_iter().flat_map(|p| (0..world).map(move |r| (p, r))) {
            let mut seen = vec![0; world];
            (0..world).for_each(|step| seen[pass.shard(rank, step, world)] += 1);
            assert_eq!(seen, vec![1; world], "{pass:?}, rank {rank} of {world}");
        }
    }
}

#[test]
fn no_two_ranks_hold_a_shard_at_once() {
    for world in WORLDS {
        for (pass, step) in PASSES.into_iter().flat_map(|p| (0..world).map(move |s| (p, s))) {
            let mut holders = vec![0; world];
            (0..world).for_each(|rank| holders[pass.shard(rank, step, world)] += 1);
            assert_eq!(holders, vec![1; world], "{pass:?}, step {step} of {world}");
        }
    }
}

#[test]
fn a_pass_begins_and_a_full_circle_ends_at_home() {
    for world in WORLDS {
        for (pass, rank) in PASSES.into_iter().flat_map(|p| (0..world).map(move |r| (p, r))) {
            assert_eq!(pass.shard(rank, 0, world), rank);
            assert_eq!(pass.shard(rank, world, world), rank);
        }
    }
}

#[test]
fn a_hop_brings_what_the_neighbour_held() {
    for world in WORLDS {
        for (pass, rank) in PASSES.into_iter().flat_map(|p| (0..world).map(move |r| (p, r))) {
            let from = pass.from(rank, world);
            assert_eq!(pass.to(from, world), rank, "from and to are inverse");
            for step in 0..world {
                let held = pass.shard(from, step, world);
                assert_eq!(pass.shard(rank, step + 1, world), held, "{pass:?} {step} of {world}");
            }
        }
    }
}

#[test]
fn passes_go_opposite_ways() {
    for world in WORLDS {
        for rank in 0..world {
            assert_eq!(Pass::Forward.to(rank, world), (rank + 1) % world);
            assert_eq!(Pass::Backward.to(rank, world), Pass::Forward.from(rank, world));
        }
    }
}

/// A gradient is begun at k - 1 at step 1, visits every other rank once, is with k + 1 at the last
/// step, and one hop from there is home.
#[test]
fn a_gradient_ends_at_home() {
    for world in WORLDS.filter(|&world| world > 1) {
        for k in 0..world {
            let visits: Vec<usize> = (1..world)
                .map(|step| {
                    let holds = |&rank: &usize| Pass::Backward.shard(rank, step, world) == k;
                    (0..world).find(holds).expect("somebody holds every shard")
                })
                .collect();
            assert_eq!(visits[0], (k + world - 1) % world);
            assert_eq!(visits[world - 2], (k + 1) % world);
            assert_eq!(Pass::Backward.to(visits[world - 2], world), k);
            for hop in visits.windows(2) {
                assert_eq!(Pass::Backward.to(hop[0], world), hop[1]);
            }
            let mut ranks = visits;
            ranks.push(k);
            ranks.sort_unstable();
            assert!(ranks.into_iter().eq(0..world), "each contributes once");
        }
    }
}

proptest! {
    #[test]
    fn parts_cover_all_rows_in_order(rows in 0_usize..1_000_000, parts in 1_usize..=300) {
        let cut: Vec<_> = (0..parts).map(|index| part(rows, parts, index)).collect();
        prop_assert_eq!(cut[0].start, 0);
        prop_assert_eq!(cut[parts - 1].end, rows);
        for pair in cut.windows(2) {
            prop_assert_eq!(pair[0].end, pair[1].start);
        }
        for rows_k in cut.iter().map(std::ops::Range::len) {
            prop_assert!(rows_k == rows / parts || rows_k == rows.div_ceil(parts));
        }
    }

    #[test]
    fn shards_of_all_groups_cover_the_unit_and_fit(
        rows in 1_usize..200_000, world in 1_usize..=64, rows_max in 1_usize..5_000,
    ) {
        let cut = Cut::new(rows, world, rows_max);
        let mut at = 0;
        for (group, k) in (0..cut.groups()).flat_map(|g| (0..world).map(move |k| (g, k))) {
            let shard = cut.shard(group, k);
            prop_assert_eq!(shard.start, at);
            prop_assert!(shard.len() <= cut.shard_rows_max());
            at = shard.end;
        }
        prop_assert_eq!(at, rows);
        prop_assert!(cut.shard_rows_max() <= rows_max);
        // One group fewer would not do.
        prop_assert!(cut.groups() == 1 || rows.div_ceil(world * (cut.groups() - 1)) > rows_max);
    }
}
