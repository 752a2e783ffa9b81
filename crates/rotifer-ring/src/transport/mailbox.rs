//! What ranks of one process wait on: a mailbox for each rank and one meeting for all.
//!
//! Knows neither devices nor regions: messages are any `Copy` type, so `tests/loom.rs` can explore
//! every interleaving of this file alone. Nothing here allocates after [`Office::new`], errors
//! apart.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

#[cfg(loom)]
use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(loom))]
use std::sync::{Condvar, Mutex, MutexGuard};

/// Queues of a mailbox: two passes by two lanes.
pub(crate) const NUM_CHANNELS: usize = 4;

/// Messages that a channel holds before its sender has to wait. Ranks keep at most two hops of a
/// channel in flight; the rest is slack for a neighbour that is late.
pub(crate) const NUM_SLOTS: usize = 8;

/// Why a wait ended without what it waited for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Interrupt {
    /// These ranks did not come within the deadline.
    Silent(Vec<usize>),
    /// This rank has ended and will never come.
    Ended(usize),
    /// Some rank has failed.
    Stopped,
}

/// State that is waited on, beside the news that ends a wait early.
#[derive(Debug)]
struct Monitor<S> {
    guarded: Mutex<Guarded<S>>,
    changed: Condvar,
}

#[derive(Debug)]
struct Guarded<S> {
    state: S,
    failed: bool,
    ended: Box<[bool]>,
}

impl<S> Monitor<S> {
    fn new(state: S, world: usize) -> Monitor<S> {
        let ended = vec![false; world].into();
        let guarded = Mutex::new(Guarded { state, failed: false, ended });
        Monitor { guarded, changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Guarded<S>> {
        // Nothing that can panic runs under the lock, and each change is whole at any line.
        self.guarded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update(&self, f: impl FnOnce(&mut Guarded<S>)) {
        f(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits until `ready` finds what it looks for. `awaited` tells which ranks it depends on.
    fn wait<R>(
        &self,
        deadline: Duration,
        mut ready: impl FnMut(&mut S) -> Option<R>,
        awaited: impl Fn(&S, usize) -> bool,
    ) -> Result<R, Interrupt> {
        let begin = Instant::now();
        let mut guarded = self.lock();
        loop {
            if guarded.failed {
                return Err(Interrupt::Stopped);
            }
            if let Some(found) = ready(&mut guarded.state) {
                return Ok(found);
            }
            let (state, ended) = (&guarded.state, &guarded.ended);
            let mut waited_for = (0..ended.len()).filter(|&rank| awaited(state, rank));
            let left = deadline.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return Err(Interrupt::Silent(waited_for.collect()));
            }
            if let Some(rank) = waited_for.find(|&rank| ended[rank]) {
                return Err(Interrupt::Ended(rank));
            }
            let woken = self.changed.wait_timeout(guarded, left);
            guarded = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// What one rank is sent.
#[derive(Debug)]
struct Mailbox<M> {
    queues: [VecDeque<M>; NUM_CHANNELS],
    /// Per channel, the number of its last message that the neighbour has taken.
    acknowledged: [u64; NUM_CHANNELS],
}

/// Where all ranks come together, round after round.
#[derive(Debug)]
struct Meeting<P> {
    /// Number of rounds that are complete.
    round: u64,
    num_here: usize,
    /// What each rank brought, for the round that is gathering and the one before, by parity: a
    /// rank reads what others brought until it comes to the next round, where some may be already.
    posts: [Box<[Option<P>]>; 2],
}

/// The mailboxes and the meeting of one world. Messages `M` go to one rank, posts `P` to all.
#[derive(Debug)]
pub(crate) struct Office<M, P> {
    boxes: Box<[Monitor<Mailbox<M>>]>,
    meeting: Monitor<Meeting<P>>,
    /// What each rank waits for: the number of a rank, [`A_MEETING`] or [`NOTHING`]. Only read to
    /// say who is to blame when a wait has taken too long, so it needs no order with anything else.
    waiting: Box<[AtomicUsize]>,
}

const NOTHING: usize = usize::MAX;
const A_MEETING: usize = usize::MAX - 1;

impl<M: Copy, P: Copy> Office<M, P> {
    /// For ranks `0..world`.
    pub fn new(world: usize) -> Office<M, P> {
        let mailbox = || Mailbox {
            queues: std::array::from_fn(|_| VecDeque::with_capacity(NUM_SLOTS)),
            acknowledged: [0; NUM_CHANNELS],
        };
        let posts = || vec![None; world].into();
        let meeting = Meeting { round: 0, num_here: 0, posts: [posts(), posts()] };
        Office {
            boxes: (0..world).map(|_| Monitor::new(mailbox(), world)).collect(),
            meeting: Monitor::new(meeting, world),
            waiting: (0..world).map(|_| AtomicUsize::new(NOTHING)).collect(),
        }
    }

    /// Lets `wait` run for `rank`, noting what it waits for. If that takes too long, the ranks to
    /// blame are those that wait for nobody themselves: ranks in a row reach the deadline together,
    /// and whoever is first would name its neighbour.
    fn noted<R>(
        &self,
        rank: usize,
        what: usize,
        wait: impl FnOnce() -> Result<R, Interrupt>,
    ) -> Result<R, Interrupt> {
        self.waiting[rank].store(what, Ordering::Relaxed);
        let found = wait().map_err(|interrupt| match interrupt {
            Interrupt::Silent(ranks) => Interrupt::Silent(self.to_blame(rank, ranks)),
            other => other,
        })?;
        // Not after an error: who gives up has still waited, and is not to blame.
        self.waiting[rank].store(NOTHING, Ordering::Relaxed);
        Ok(found)
    }

    /// The ranks behind `first`, for which `rank` waits, that wait for nobody; `first` if there is
    /// none.
    fn to_blame(&self, rank: usize, first: Vec<usize>) -> Vec<usize> {
        let mut seen = vec![false; self.waiting.len()];
        seen[rank] = true;
        let mut open = first.clone();
        let mut found = Vec::new();
        while let Some(next) = open.pop() {
            if std::mem::replace(&mut seen[next], true) {
                continue;
            }
            match self.waiting[next].load(Ordering::Relaxed) {
                NOTHING => found.push(next),
                A_MEETING => {
                    let guarded = self.meeting.lock();
                    let meeting = &guarded.state;
                    let here = |r: usize| meeting.posts[parity(meeting.round + 1)][r].is_some();
                    open.extend((0..seen.len()).filter(|&r| !here(r)));
                }
                other => open.push(other),
            }
        }
        found.sort_unstable();
        if found.is_empty() { first } else { found }
    }

    /// Puts a message of rank `from` in the mailbox of rank `to`. Waits only if the channel is
    /// full.
    pub fn send(
        &self,
        from: usize,
        to: usize,
        channel: usize,
        message: M,
        deadline: Duration,
    ) -> Result<(), Interrupt> {
        let put = |mailbox: &mut Mailbox<M>| {
            let queue = &mut mailbox.queues[channel];
            (queue.len() < NUM_SLOTS).then(|| queue.push_back(message))
        };
        self.noted(from, to, || self.boxes[to].wait(deadline, put, |_, rank| rank == to))?;
        self.boxes[to].changed.notify_all();
        Ok(())
    }

    /// Takes the next message for `rank` from a channel. While there is none, it takes one from
    /// another channel that is `stray`: then the ranks are out of step, and waiting would only hide
    /// it. `from` is the rank whose message is awaited.
    pub fn receive(
        &self,
        rank: usize,
        from: usize,
        channel: usize,
        deadline: Duration,
        stray: impl Fn(&M) -> bool,
    ) -> Result<M, Interrupt> {
        let take = |mailbox: &mut Mailbox<M>| {
            let queues = &mut mailbox.queues;
            queues[channel]
                .pop_front()
                .or_else(|| queues.iter_mut().find(|q| q.front().is_some_and(&stray))?.pop_front())
        };
        let wait = || self.boxes[rank].wait(deadline, take, |_, other| other == from);
        let message = self.noted(rank, from, wait)?;
        self.boxes[rank].changed.notify_all();
        Ok(message)
    }

    /// Tells rank `to` that its message number `sequence` of a channel has been taken.
    pub fn acknowledge(&self, to: usize, channel: usize, sequence: u64) {
        self.boxes[to].update(|guarded| guarded.state.acknowledged[channel] = sequence);
    }

    /// Waits until rank `by` has taken message number `sequence` that `rank` sent it.
    pub fn acknowledged(
        &self,
        rank: usize,
        by: usize,
        channel: usize,
        sequence: u64,
        deadline: Duration,
    ) -> Result<(), Interrupt> {
        let taken =
            |mailbox: &mut Mailbox<M>| (mailbox.acknowledged[channel] >= sequence).then_some(());
        self.noted(rank, by, || self.boxes[rank].wait(deadline, taken, |_, other| other == by))
    }

    /// Brings `post` to the next round. Returns the number of the round, from 1.
    pub fn come(&self, rank: usize, post: P) -> u64 {
        let mut round = 0;
        self.meeting.update(|guarded| {
            let (meeting, world) = (&mut guarded.state, guarded.ended.len());
            round = meeting.round + 1;
            if meeting.posts[parity(round)][rank].replace(post).is_none() {
                meeting.num_here += 1;
            }
            if meeting.num_here == world {
                meeting.round = round;
                meeting.num_here = 0;
                // All are here, so none reads the round before any more.
                meeting.posts[parity(round + 1)].fill(None);
            }
        });
        round
    }

    /// Waits, as `rank`, until all ranks have come to `round`.
    pub fn all_here(&self, rank: usize, round: u64, deadline: Duration) -> Result<(), Interrupt> {
        let complete = |meeting: &mut Meeting<P>| (meeting.round >= round).then_some(());
        let absent =
            |meeting: &Meeting<P>, rank: usize| meeting.posts[parity(round)][rank].is_none();
        self.noted(rank, A_MEETING, || self.meeting.wait(deadline, complete, absent))
    }

    /// What `rank` brought to a round that is complete; until the caller comes to the next one.
    pub fn post(&self, round: u64, rank: usize) -> P {
        self.meeting.lock().state.posts[parity(round)][rank].expect("a rank of a complete round")
    }

    /// Ends all waits for `rank`, which will not come again.
    pub fn end(&self, rank: usize) {
        self.boxes.iter().for_each(|b| b.update(|guarded| guarded.ended[rank] = true));
        self.meeting.update(|guarded| guarded.ended[rank] = true);
    }

    /// Ends all waits, now and later.
    pub fn fail(&self) {
        self.boxes.iter().for_each(|b| b.update(|guarded| guarded.failed = true));
        self.meeting.update(|guarded| guarded.failed = true);
    }
}

const fn parity(round: u64) -> usize {
    (round % 2) as usize
}
