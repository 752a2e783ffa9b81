//! Whatever goes wrong is found, named and ends all ranks: no call here ever hangs.

mod common;

use std::sync::Mutex;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use common::{PATIENT, failure, options, regions, start, tag};
use rotifer_device::{CpuDevice, Device, Dtype};
use rotifer_ring::launch::{self, Failure, Options};
use rotifer_ring::schedule::Pass;
use rotifer_ring::{Comm, Error, HopMode, Lane, Result, Tag};

/// Long enough for ranks to meet on a busy machine.
const SHORT: Duration = Duration::from_millis(300);

/// One forward hop of four elements.
fn hop(comm: &Comm, dev: &dyn Device, tag: Tag) -> Result<()> {
    let [send, spare] = regions(comm, dev, Dtype::F32, [4, 4])?;
    let into = (comm.hop_mode() == HopMode::Copy).then_some(spare);
    let hop = start(comm, dev, tag, send, 4, into)?;
    comm.finish(dev, hop).map(|_| ())
}

const MLP: Tag = Tag { unit: 2, pass: Pass::Forward, step: 1, lane: Lane::Weights };

#[test]
fn a_silent_neighbour_is_named_with_unit_and_step_3_ranks() {
    for mode in [HopMode::HandOver, HopMode::Copy] {
        let (rank, cause) = failure(SHORT, 3, mode, |comm, dev| {
            if comm.rank() == 1 {
                regions(comm, dev, Dtype::F32, [4, 4])?;
                sleep(3 * SHORT);
                return Ok(());
            }
            hop(comm, dev, MLP)
        });
        let waits =
            "rank 1 is silent: unit h.0.mlp, forward step 1/3, weights, sequence 1, after 0.3 s";
        // When copying, rank 0 waits for rank 1 as well: to take what it sent.
        assert!(rank == 2 || (rank == 0 && mode == HopMode::Copy), "rank {rank}");
        assert_eq!(cause, waits);
    }
}

#[test]
fn ranks_absent_from_a_collective_are_named_4_ranks() {
    let (_, cause) = failure(SHORT, 4, HopMode::HandOver, |comm, dev| {
        let [x] = regions(comm, dev, Dtype::F32, [4])?;
        if comm.rank() % 2 == 1 {
            sleep(3 * SHORT);
            return Ok(());
        }
        comm.all_reduce(dev, x)
    });
    assert_eq!(cause, "ranks 1, 3 are silent: all-reduce, sequence 2, after 0.3 s");
}

#[test]
fn a_neighbour_at_another_step_is_a_mismatch_2_ranks() {
    let (rank, cause) = failure(PATIENT, 2, HopMode::HandOver, |comm, dev| {
        let step = MLP.step + comm.rank() as u32;
        hop(comm, dev, Tag { step, ..MLP })?;
        comm.barrier()
    });
    let place = |rank: usize| {
        format!("unit h.0.mlp, forward step {}/2, weights, sequence 1", MLP.step + rank as u32)
    };
    assert_eq!(
        cause,
        format!(
            "out of step: this rank is at {}, but rank {} is at {}",
            place(rank),
            1 - rank,
            place(1 - rank)
        )
    );
}

/// One rank in backward while the others are in forward: messages go the other way and into other
/// channels, and still nobody waits for the deadline.
fn check_other_pass(world: usize) {
    let begin = Instant::now();
    let (_, cause) = failure(PATIENT, world, HopMode::Copy, |comm, dev| {
        let pass = if comm.rank() == 0 { Pass::Backward } else { Pass::Forward };
        hop(comm, dev, Tag { pass, ..MLP })?;
        comm.barrier()
    });
    assert!(cause.contains("out of step") && cause.contains("backward"), "{cause}");
    assert!(begin.elapsed() < PATIENT / 2);
}

#[test]
fn a_neighbour_in_another_pass_is_a_mismatch_2_ranks() {
    check_other_pass(2);
}

#[test]
fn a_neighbour_in_another_pass_is_a_mismatch_3_ranks() {
    check_other_pass(3);
}

#[test]
fn a_neighbour_in_another_pass_is_a_mismatch_7_ranks() {
    check_other_pass(7);
}

#[test]
fn a_rank_that_skips_a_unit_is_a_mismatch_3_ranks() {
    let (_, cause) = failure(PATIENT, 3, HopMode::HandOver, |comm, dev| {
        let [x] = regions(comm, dev, Dtype::F32, [4])?;
        for unit in usize::from(comm.rank() == 1)..3 {
            let tag = Tag { unit: unit as u32, ..tag(Pass::Backward, 2, Lane::Gradients) };
            let hop = start(comm, dev, tag, x, 4, None)?;
            comm.finish(dev, hop)?;
        }
        comm.barrier()
    });
    assert!(cause.contains("wte") && cause.contains("h.0.attn"), "{cause}");
}

#[test]
fn a_shard_of_another_size_is_named_4_ranks() {
    for mode in [HopMode::HandOver, HopMode::Copy] {
        let (rank, cause) = failure(PATIENT, 4, mode, |comm, dev| {
            let [send, spare] = regions(comm, dev, Dtype::F32, [5, 4])?;
            let send = send.first(if comm.rank() == 2 { 5 } else { 4 });
            let into = (mode == HopMode::Copy).then_some(spare);
            let hop = start(comm, dev, MLP, send, 4, into)?;
            comm.finish(dev, hop)?;
            comm.barrier()
        });
        assert_eq!(rank, 3);
        assert_eq!(
            cause,
            "sizes differ: rank 2 sent 20 bytes, this rank expects 16: \
             unit h.0.mlp, forward step 1/4, weights, sequence 1"
        );
    }
}

#[test]
fn ranks_in_different_collectives_are_a_mismatch_3_ranks() {
    let (_, cause) = failure(PATIENT, 3, HopMode::HandOver, |comm, dev| {
        let [x] = regions(comm, dev, Dtype::F32, [4])?;
        if comm.rank() == 1 { comm.broadcast(dev, 2, x) } else { comm.all_reduce(dev, x) }
    });
    for part in ["out of step", "all-reduce, sequence 2", "broadcast from rank 2, sequence 2"] {
        assert!(cause.contains(part), "{cause}");
    }
}

#[test]
fn a_collective_of_different_sizes_is_named_2_ranks() {
    let (rank, cause) = failure(PATIENT, 2, HopMode::HandOver, |comm, dev| {
        let [x] = regions(comm, dev, Dtype::F32, [4])?;
        comm.all_reduce(dev, x.first(3 + comm.rank()))
    });
    let bytes = |rank| 4 * (3 + rank);
    let other = 1 - rank;
    assert_eq!(
        cause,
        format!(
            "sizes differ: rank {other} sent {} bytes, this rank expects {}: \
             all-reduce, sequence 2",
            bytes(other),
            bytes(rank)
        )
    );
}

#[test]
fn a_rank_that_ends_early_is_not_waited_for_2_ranks() {
    for collective in [false, true] {
        let begin = Instant::now();
        let (rank, cause) = failure(PATIENT, 2, HopMode::HandOver, |comm, dev| {
            let [x] = regions(comm, dev, Dtype::F32, [4])?;
            match (comm.rank(), collective) {
                (0, _) => Ok(()),
                (_, true) => comm.barrier(),
                (_, false) => {
                    let hop = start(comm, dev, MLP, x, 4, None)?;
                    comm.finish(dev, hop).map(|_| ())
                }
            }
        });
        assert_eq!(rank, 1);
        assert!(cause.starts_with("rank 0 has ended, but is waited for: "), "{cause}");
        assert!(begin.elapsed() < PATIENT / 2);
    }
}

/// An error of the caller's own, as a trainer has.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error("shard 3 of the data is damaged")]
    Data,
    #[error(transparent)]
    Ring(#[from] Error),
}

/// Rank `culprit` fails while all others wait: in hops, or in a collective.
fn check_first_cause(world: usize, culprit: usize, panics: bool, collective: bool) {
    let seen = Mutex::new(Vec::new());
    let begin = Instant::now();
    let result = launch::threads(&options(world, HopMode::Copy, PATIENT), |comm| {
        if comm.rank() == culprit {
            sleep(SHORT / 2);
            assert!(!panics, "index {culprit} is out of range");
            return Err(Trouble::Data);
        }
        let waited = if collective { comm.barrier() } else { hop(&comm, &CpuDevice::new(1), MLP) };
        let error = waited.expect_err("one rank never comes");
        seen.lock().unwrap().push(error.clone());
        Err::<(), _>(error.into())
    });
    match result.expect_err("one rank failed") {
        Failure::Failed { rank, cause: Trouble::Data } if !panics => assert_eq!(rank, culprit),
        Failure::Panicked { rank, message } if panics => {
            assert_eq!((rank, message), (culprit, format!("index {culprit} is out of range")));
        }
        other => panic!("not the first cause: {other}"),
    }
    let cause = if panics {
        format!("panicked: index {culprit} is out of range").into()
    } else {
        Trouble::Data.to_string().into()
    };
    let seen = seen.into_inner().unwrap();
    assert_eq!(seen, vec![Error::Stopped { rank: culprit, cause }; world - 1]);
    assert!(begin.elapsed() < PATIENT / 2, "ended by the failure, not by the deadline");
}

fn check_all_first_causes(world: usize) {
    for (panics, collective) in [(false, false), (false, true), (true, false), (true, true)] {
        check_first_cause(world, world - 1, panics, collective);
        check_first_cause(world, 0, panics, collective);
    }
}

#[test]
fn the_first_failure_ends_all_and_is_reported_2_ranks() {
    check_all_first_causes(2);
}

#[test]
fn the_first_failure_ends_all_and_is_reported_3_ranks() {
    check_all_first_causes(3);
}

#[test]
fn the_first_failure_ends_all_and_is_reported_4_ranks() {
    check_all_first_causes(4);
}

#[test]
fn the_first_failure_ends_all_and_is_reported_7_ranks() {
    check_all_first_causes(7);
}

/// Even a call that would not have to wait fails, so that a rank which computes does not go on.
#[test]
fn a_rank_that_computes_is_stopped_at_its_next_call_2_ranks() {
    let result = launch::threads(&Options::new(2), |comm| {
        let dev = &CpuDevice::new(1);
        let [x] = regions(&comm, dev, Dtype::F32, [4])?;
        if comm.rank() == 1 {
            return Err(Trouble::Data);
        }
        sleep(SHORT);
        let error = start(&comm, dev, MLP, x, 4, None).expect_err("rank 1 has failed");
        assert!(error.is_consequence(), "{error}");
        Ok(())
    });
    assert_eq!(result.unwrap_err().to_string(), "rank 1: shard 3 of the data is damaged");
}

/// A rank's memory stays readable when the rank, its device and its arena are gone.
#[test]
fn memory_outlives_the_rank_that_shared_it_2_ranks() {
    let sums = launch::threads(&Options::new(2), |comm| {
        let dev = &CpuDevice::new(1);
        let [x] = regions(&comm, dev, Dtype::F32, [1 << 16])?;
        dev.fill(x, 1.0 + comm.rank() as f32);
        let hop = start(&comm, dev, MLP, x, 1 << 16, None)?;
        let arrived = comm.finish(dev, hop)?;
        if comm.rank() == 0 {
            return Ok(0.0);
        }
        sleep(SHORT);
        Ok::<_, Error>(common::read_f32(dev, arrived).iter().sum::<f32>())
    });
    assert_eq!(sums.unwrap(), [0.0, 65536.0]);
}

#[test]
fn no_ranks_are_an_error() {
    let failure = launch::threads(&Options::new(0), |_| Ok::<_, Error>(())).unwrap_err();
    assert_eq!(failure.to_string(), "0 ranks cannot run anything; ask for 1 or more");
}

#[test]
fn rank_threads_are_named_3_ranks() {
    let names = launch::threads(&Options::new(3), |_| {
        Ok::<_, Error>(thread::current().name().unwrap().to_owned())
    });
    assert_eq!(names.unwrap(), ["rank-0", "rank-1", "rank-2"]);
}
