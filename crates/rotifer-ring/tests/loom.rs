//! Every interleaving (of two or three preemptions) of the mailboxes and the meeting, by loom.
//!
//!     RUSTFLAGS="--cfg loom" cargo test -p rotifer-ring --release --test loom
//!
//! Loom's waits never time out, so a wake-up that is lost shows as a deadlock.

#![cfg(loom)]

#[path = "../src/transport/mailbox.rs"]
mod mailbox;

use std::sync::Arc;
use std::time::Duration;

use loom::thread;
use mailbox::{Interrupt, NUM_SLOTS, Office};

type Numbers = Office<u64, u64>;

const FOREVER: Duration = Duration::MAX;

/// Runs `f` for each rank on a thread of its own, the last on the model's first thread.
fn explore(world: usize, preemptions: usize, f: fn(&Numbers, usize)) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let office = Arc::new(Numbers::new(world));
        let others: Vec<_> = (0..world - 1)
            .map(|rank| {
                let office = office.clone();
                thread::spawn(move || f(&office, rank))
            })
            .collect();
        f(&office, world - 1);
        others.into_iter().for_each(|rank| rank.join().unwrap());
    });
}

/// One copied hop, forward: send, take, acknowledge, wait for the acknowledgement.
fn hop(office: &Numbers, rank: usize, world: usize, channel: usize, sequence: u64) {
    let (to, from) = ((rank + 1) % world, (rank + world - 1) % world);
    let message = |rank: usize| sequence * 10 + rank as u64;
    office.send(rank, to, channel, message(rank), FOREVER).unwrap();
    let got = office.receive(rank, from, channel, FOREVER, |_| false).unwrap();
    assert_eq!(got, message(from));
    office.acknowledge(from, channel, sequence);
    office.acknowledged(rank, to, channel, sequence, FOREVER).unwrap();
}

#[test]
fn hops_arrive_and_are_acknowledged_2_ranks() {
    explore(2, 3, |office, rank| {
        hop(office, rank, 2, 0, 1);
        hop(office, rank, 2, 3, 2);
        hop(office, rank, 2, 0, 3);
    });
}

#[test]
fn hops_arrive_and_are_acknowledged_3_ranks() {
    explore(3, 2, |office, rank| hop(office, rank, 3, 1, 1));
}

#[test]
fn a_full_channel_holds_its_sender_and_keeps_order_2_ranks() {
    explore(2, 2, |office, rank| {
        let messages = 0..NUM_SLOTS as u64 + 2;
        if rank == 0 {
            messages.for_each(|m| office.send(0, 1, 2, m, FOREVER).unwrap());
        } else {
            messages.for_each(|m| assert_eq!(office.receive(1, 0, 2, FOREVER, |_| false), Ok(m)));
        }
    });
}

#[test]
fn a_stray_message_is_found_while_waiting_2_ranks() {
    explore(2, 3, |office, rank| {
        if rank == 0 {
            office.send(0, 1, 0, 6, FOREVER).unwrap();
            office.send(0, 1, 3, 7, FOREVER).unwrap();
        } else {
            assert_eq!(office.receive(1, 0, 1, FOREVER, |&m| m == 7), Ok(7));
        }
    });
}

#[test]
fn a_failure_ends_every_wait_3_ranks() {
    explore(3, 2, |office, rank| {
        let waited = match rank {
            0 => office.receive(0, 2, 0, FOREVER, |_| false).map(|_| ()),
            1 => office.all_here(1, office.come(1, 0), FOREVER),
            _ => return office.fail(),
        };
        assert_eq!(waited, Err(Interrupt::Stopped));
    });
}

#[test]
fn a_failure_ends_the_wait_for_an_acknowledgement_2_ranks() {
    explore(2, 3, |office, rank| {
        if rank == 0 {
            office.send(0, 1, 0, 5, FOREVER).unwrap_or_else(|e| assert_eq!(e, Interrupt::Stopped));
            assert_eq!(office.acknowledged(0, 1, 0, 1, FOREVER), Err(Interrupt::Stopped));
        } else {
            office.fail();
        }
    });
}

/// What a rank sent and whom it met before it ended still counts; more does not come.
#[test]
fn a_rank_that_ended_is_not_waited_for_2_ranks() {
    explore(2, 3, |office, rank| {
        if rank == 0 {
            office.send(0, 1, 0, 5, FOREVER).unwrap();
            office.come(0, 0);
            office.end(0);
        } else {
            assert_eq!(office.receive(1, 0, 0, FOREVER, |_| false), Ok(5));
            assert_eq!(office.receive(1, 0, 0, FOREVER, |_| false), Err(Interrupt::Ended(0)));
            assert_eq!(office.all_here(1, office.come(1, 0), FOREVER), Ok(()));
            assert_eq!(office.all_here(1, office.come(1, 0), FOREVER), Err(Interrupt::Ended(0)));
        }
    });
}

/// Nobody leaves a round before all have come, and everybody finds what each brought to it, even if
/// some are a round ahead.
fn rounds(office: &Numbers, rank: usize, world: usize, num_rounds: u64) {
    for expected in 1..=num_rounds {
        let round = office.come(rank, expected * 10 + rank as u64);
        assert_eq!(round, expected);
        office.all_here(rank, round, FOREVER).unwrap();
        for other in 0..world {
            assert_eq!(office.post(round, other), expected * 10 + other as u64);
        }
    }
}

#[test]
fn all_meet_round_after_round_2_ranks() {
    explore(2, 3, |office, rank| rounds(office, rank, 2, 3));
}

#[test]
fn all_meet_round_after_round_3_ranks() {
    explore(3, 2, |office, rank| rounds(office, rank, 3, 2));
}
