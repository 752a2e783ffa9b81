//! Gathering: every use finds the whole of its weights as they are now, and every rank's gradients
//! come home as a sum in the order of ranks; however often a unit is used, kept or gathered again.

mod common;

use std::thread::sleep;
use std::time::{Duration, Instant};

use common::uses::{
    FORMS, Form, UNITS, check_pass, gathering, part_of, parts, weights_of, write_weights,
};
use common::{MODES, PATIENT, WORLDS, failure, noise_f32, on_ranks, on_ranks_within, read_f32};
use rotifer_device::{Arena, Device, Region};
use rotifer_ring::schedule::{Cut, Pass};
use rotifer_ring::{Gather, Gathering, HopMode, Parts, Spares};

/// What rank `rank` adds to the gradient of a use in a step and micro-batch.
fn gradient_of(rank: usize, number: usize, pass: usize, len: usize) -> Vec<f32> {
    noise_f32(rank + 10 * number + 1000 * pass, len)
}

/// What the home of a unit holds after backward passes `passes`: of every pass and use, in the
/// order of backward, the ranks' gradients one after the other.
fn home_of(world: usize, uses: &[Gather], unit: usize, passes: &[usize]) -> Vec<f32> {
    let len = parts(unit, world).len();
    let mut home = vec![0.0; len];
    for pass in passes {
        let users = (0..uses.len()).rev().filter(|number| uses[*number].unit as usize == unit);
        for (number, rank) in users.flat_map(|number| (0..world).map(move |rank| (number, rank))) {
            let addend = gradient_of(rank, number, *pass, len);
            home.iter_mut().zip(addend).for_each(|(h, a)| *h += a);
        }
    }
    home
}

/// Three steps of two micro-batches with an evaluation in between.
fn check_steps(world: usize, form: Form) {
    on_ranks(world, MODES[world % 2], |comm, dev| {
        let (_arena, uses, gathering) = gathering(comm, dev, form)?;
        let (rank, it) = (comm.rank(), (&gathering, &uses[..], form));
        for step in 0..3 {
            write_weights(comm, dev, &uses, step);
            gathering.refresh(dev)?;
            uses.iter().for_each(|gather| dev.fill(gather.gradients, 0.0));
            check_pass(dev, it, Pass::Forward, step, |_| Ok(()))?;
            for micro in 0..2 {
                check_pass(dev, it, Pass::Forward, step, |_| Ok(()))?;
                check_pass(dev, it, Pass::Backward, step, |number| {
                    let len = uses[number].parts.len();
                    let values = gradient_of(rank, number, 2 * step + micro, len);
                    gathering.gradient(dev, number, |all| add(dev, all, &values, world))
                })?;
            }
            gathering.settle(dev)?;
            for (unit, gather) in uses[..UNITS.len()].iter().enumerate() {
                let want = home_of(world, &uses, unit, &[2 * step, 2 * step + 1]);
                let want = part_of(&gather.parts, rank, &want);
                let got = read_f32(dev, gather.gradients.first(want.len()));
                assert_eq!(got, want, "{world} ranks, {form:?}, unit {unit}");
            }
        }
        Ok(())
    });
}

/// Adds to the gradient, which must be zero unless it is the home itself.
fn add(dev: &dyn Device, all: Region, values: &[f32], world: usize) {
    let mut sum = read_f32(dev, all);
    assert!(world == 1 || sum.iter().all(|x| *x == 0.0), "a gradient begins at zero");
    sum.iter_mut().zip(values).for_each(|(s, v)| *s += v);
    dev.write_f32(&sum, all);
}

#[test]
fn weights_are_whole_and_gradients_come_home() {
    for world in WORLDS {
        for form in FORMS {
            check_steps(world, form);
        }
    }
}

/// What is there is not gathered again: from forward to backward the last use, or all if they are
/// kept; and the first use, which backward does not read.
#[test]
fn nothing_is_gathered_twice_in_a_row_3_ranks() {
    for form in FORMS {
        on_ranks(3, HopMode::HandOver, |comm, dev| {
            let (_arena, uses, gathering) = gathering(comm, dev, form)?;
            write_weights(comm, dev, &uses, 0);
            let it = (&gathering, &uses[..], form);
            check_pass(dev, it, Pass::Forward, 0, |_| Ok(()))?;
            check_pass(dev, it, Pass::Backward, 0, |number| {
                gathering.gradient(dev, number, |_| ())
            })?;
            gathering.settle(dev)?;
            let sent = |number: &usize| (2 * 4 * uses[*number].parts.len() / 3) as u64;
            let all = || 0..uses.len();
            let forward = all().filter(|n| !form.kept || n + 1 < uses.len());
            // The first use reads no weights in backward, the last is still there, and with two
            // spares the one before as well.
            let held = if form.overlap { 2 } else { 1 };
            let again = (1..uses.len() - held).filter(|_| !form.kept);
            let gathered: u64 = forward.chain(again).map(|n| sent(&n)).sum();
            let scattered: u64 = all().map(|n| sent(&n)).sum();
            let moved = comm.traffic().collectives_bytes;
            assert_eq!(moved, gathered + scattered, "{form:?}");
            Ok(())
        });
    }
}

/// Weights that have changed are not taken from what was gathered before, unless nobody says so.
#[test]
fn refresh_forgets_what_was_gathered_2_ranks() {
    for form in FORMS {
        on_ranks(2, HopMode::HandOver, |comm, dev| {
            let (_arena, uses, gathering) = gathering(comm, dev, form)?;
            let whole = |step| -> rotifer_ring::Result<()> {
                let got = gathering.weights(dev, Pass::Forward, 0)?;
                let want = weights_of(0, step, 2);
                assert_eq!(read_f32(dev, got.first(want.len())), want, "{form:?}");
                Ok(())
            };
            write_weights(comm, dev, &uses, 1);
            whole(1)?;
            // The gather that runs ahead has read the old weights, or none yet.
            gathering.settle(dev)?;
            write_weights(comm, dev, &uses, 2);
            comm.barrier()?;
            whole(1)?;
            gathering.refresh(dev)?;
            whole(2)
        });
    }
}

#[test]
fn a_rank_that_skips_a_use_is_a_mismatch_3_ranks() {
    for form in FORMS {
        let (rank, cause) = failure(PATIENT, 3, HopMode::HandOver, |comm, dev| {
            let (_arena, _, gathering) = gathering(comm, dev, form)?;
            let first = if comm.rank() == 1 { 2 } else { 0 };
            gathering.weights(dev, Pass::Forward, first).map(|_| ())
        });
        let place = |unit: &str| format!("at unit {unit}, forward all-gather, sequence 2");
        let [own, other] = if rank == 1 { ["h.0.mlp", "wte"] } else { ["wte", "h.0.mlp"] };
        let says = cause.starts_with(&format!("out of step: this rank is {}", place(own)));
        assert!(says && cause.ends_with(&place(other)), "rank {rank}: {cause}");
    }
}

/// Every rank expects of each other the part that is that one's, whose sizes differ: a rank that
/// thinks a unit has a row more finds that rank 0 has none to show.
#[test]
fn a_shard_of_another_size_is_named_4_ranks() {
    let (rank, cause) = failure(PATIENT, 4, HopMode::HandOver, |comm, dev| {
        let (_arena, mut uses, gathering) = gathering(comm, dev, FORMS[1])?;
        assert_eq!([0, 1, 2, 3].map(|rank| uses[2].parts.len_of(rank)), [0, 2, 2, 2]);
        if comm.rank() != 3 {
            return gathering.weights(dev, Pass::Forward, 2).map(|_| ());
        }
        uses[2].parts = Parts::new(Cut::in_groups(4, 4, usize::MAX), 0, [2].into());
        let spares = Spares::take(&mut Arena::counting(), comm, false, &[]);
        uses[2].kept = Some((0, uses[0].weights));
        let gathering = Gathering::new(comm.clone(), false, spares, uses);
        gathering.weights(dev, Pass::Forward, 2).map(|_| ())
    });
    let says = "sizes differ: rank 0 sent 0 bytes, this rank expects 8: unit h.0.mlp, forward \
                all-gather, sequence ";
    assert!(rank == 3 && cause.starts_with(says), "rank {rank}: {cause}");
}

/// In the middle of a pass, with gathers and scatters under way.
#[test]
fn a_rank_that_leaves_a_pass_is_named_4_ranks() {
    let begin = Instant::now();
    let deadline = Duration::from_millis(300);
    let passes = |silent: bool, form: Form| {
        move |comm: &rotifer_ring::Comm, dev: &dyn Device| {
            let (_arena, uses, gathering) = gathering(comm, dev, form)?;
            write_weights(comm, dev, &uses, 0);
            let it = (&gathering, &uses[..], form);
            check_pass(dev, it, Pass::Forward, 0, |_| Ok(()))?;
            check_pass(dev, it, Pass::Backward, 0, |number| {
                if comm.rank() == 2 && number == 1 {
                    if silent {
                        sleep(3 * deadline);
                    }
                    assert!(silent, "planted");
                }
                gathering.gradient(dev, number, |_| ())
            })?;
            gathering.settle(dev)
        }
    };
    for form in FORMS {
        let (_, cause) = failure(deadline, 4, HopMode::Copy, passes(true, form));
        let waits = cause.starts_with("rank 2 is silent: unit ") && cause.contains(", backward ");
        assert!(waits && cause.ends_with("after 0.3 s"), "{form:?}: {cause}");
        let ended = on_ranks_within(PATIENT, 4, HopMode::Copy, passes(false, form));
        let failure = ended.expect_err("a rank that panics").to_string();
        assert_eq!(failure, "rank 2 panicked: planted", "{form:?}");
    }
    assert!(begin.elapsed() < PATIENT / 2, "nobody waits for the deadline");
}
