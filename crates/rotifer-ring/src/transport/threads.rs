//! Ranks that are threads of one process.
//!
//! A message is the handle of a region. In [`HopMode::HandOver`] the receiver uses the region where
//! it lies; in [`HopMode::Copy`] it copies it, straight from the sender's memory, and acknowledges.
//! Collectives read the other ranks' memory between two meetings.
//!
//! Every wait checks three things: what it waits for, whether a rank has failed or ended, and the
//! deadline; so nothing here hangs.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rotifer_device::{Clock, Device, Dtype, Lent, Memory, Region, Write};

use super::line::Line;
use super::mailbox::{Interrupt, Office};
use super::{Header, Transport};
use crate::comm::Pending;
use crate::error::{Collective, Place};
use crate::launch::Simulation;
use crate::operation::Operation;
use crate::schedule::Pass;
use crate::{Error, HopMode, Parts, Result, Subject, launch, schedule};

#[derive(Clone, Copy, Debug)]
struct Message {
    header: Header,
    region: Lent,
    /// When it was sent: where a simulated link begins to count.
    sent: Duration,
}

/// What a rank brings to a collective.
#[derive(Clone, Copy, Debug)]
struct Post {
    collective: Collective,
    subject: Option<Subject>,
    region: Lent,
    /// From when on this rank's side of a simulated link is free for it.
    ready: Duration,
    /// When this rank came.
    now: Duration,
}

/// What the ranks of one process share.
#[derive(Debug)]
pub(crate) struct World {
    office: Office<Message, Post>,
    options: launch::Options,
    /// When real time begins to count.
    origin: Instant,
    /// Every memory a rank has shared. Kept until the last rank is gone: a rank that fails leaves
    /// at once, while others may be reading its memory.
    memories: Mutex<Vec<Arc<Memory>>>,
    /// The first rank that failed, and why.
    failure: OnceLock<(usize, Arc<str>)>,
}

impl World {
    pub fn new(options: &launch::Options) -> World {
        World {
            office: Office::new(options.ranks),
            options: *options,
            origin: Instant::now(),
            memories: Mutex::default(),
            failure: OnceLock::new(),
        }
    }

    /// A clock for one rank.
    pub fn clock(&self) -> Clock {
        match self.options.simulation {
            Some(_) => Clock::simulated(),
            None => Clock::wall(self.origin),
        }
    }

    /// `rank` has done all it had to.
    pub fn end(&self, rank: usize) {
        self.office.end(rank);
    }

    /// `rank` cannot go on; neither, from now, can any other. Later failures are consequences.
    pub fn fail(&self, rank: usize, cause: &str) {
        self.failure.get_or_init(|| (rank, cause.into()));
        self.office.fail();
    }

    /// The rank that failed first.
    pub fn failed(&self) -> Option<usize> {
        self.failure.get().map(|(rank, _)| *rank)
    }
}

/// One rank of a [`World`].
#[derive(Debug)]
pub(crate) struct Threads {
    world: Arc<World>,
    rank: usize,
    clock: Clock,
    line: Mutex<Line>,
}

impl Threads {
    pub fn new(world: Arc<World>, rank: usize, clock: Clock) -> Threads {
        Threads { world, rank, clock, line: Mutex::default() }
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ranks(&self) -> usize {
        self.world.options.ranks
    }

    fn deadline(&self) -> Duration {
        self.world.options.deadline
    }

    fn simulation(&self) -> Option<Simulation> {
        self.world.options.simulation
    }

    /// Whether copies and sums are this rank's own work.
    fn copies(&self) -> bool {
        self.simulation().is_none_or(|simulation| simulation.ranks_copy)
    }

    /// Waits until the simulated link, if there is one, has delivered what `from` sent at `sent`
    /// (`None`: what all ranks sent each other): messages of one pass share it one after the other.
    /// It takes no processor, so what a rank computes meanwhile hides it, as with a network.
    fn deliver(&self, from: Option<usize>, pass: Pass, size: (u32, usize), sent: Duration) {
        let options = &self.world.options;
        let link = match from {
            Some(from) => options.link_of(from, self.rank),
            None => options.slowest_link(),
        };
        if let Some(link) = link {
            let arrival = self.line().carry(link, pass, size, sent, self.clock.now());
            self.clock.wait_until(arrival);
        }
    }

    /// Simulated time: whoever waits goes on when it has been woken.
    fn woken_by(&self, event: Duration) {
        if let Some(simulation) = self.simulation() {
            self.clock.wait_until(event + simulation.wake);
        }
    }

    fn error(&self, interrupt: Interrupt, at: Place) -> Error {
        match interrupt {
            Interrupt::Silent(ranks) => Error::Silent { ranks, at, after: self.deadline() },
            Interrupt::Ended(rank) => Error::Ended { rank, at },
            Interrupt::Stopped => {
                let (rank, cause) = self.world.failure.get().expect("set before waits are ended");
                Error::Stopped { rank: *rank, cause: cause.clone() }
            }
        }
    }

    fn check(&self, from: usize, expected: Header, got: Header) -> Result<()> {
        let place = |header: Header| header.place(self.ranks());
        if (got.sequence, got.tag) != (expected.sequence, expected.tag) {
            return Err(Error::Mismatch {
                rank: from,
                ours: Box::new(place(expected)),
                theirs: Box::new(place(got)),
            });
        }
        if got.bytes != expected.bytes {
            let (expected, got, at) = (expected.bytes, got.bytes, place(expected));
            return Err(Error::Size { rank: from, at, expected, got });
        }
        Ok(())
    }

    /// Brings a region to a meeting, and checks that all ranks are there for the same thing, with
    /// as many bytes as are expected of each.
    fn meet(&self, post: Post, expected: impl Fn(usize) -> usize) -> Result<u64> {
        let office = &self.world.office;
        let round = office.come(self.rank, post);
        let place = |Post { collective, subject, .. }: Post| Place::Collective {
            unit: None,
            subject,
            collective,
            sequence: round,
        };
        office
            .all_here(self.rank, round, self.deadline())
            .map_err(|interrupt| self.error(interrupt, place(post)))?;
        for rank in 0..self.ranks() {
            let theirs = office.post(round, rank);
            if (theirs.collective, theirs.subject) != (post.collective, post.subject) {
                return Err(Error::Mismatch {
                    rank,
                    ours: Box::new(place(post)),
                    theirs: Box::new(place(theirs)),
                });
            }
            let (expected, got) = (expected(rank), theirs.region.bytes());
            if got != expected {
                return Err(Error::Size { rank, at: place(post), expected, got });
            }
        }
        if self.copies() || matches!(post.collective, Collective::Barrier | Collective::Share) {
            let last = (0..self.ranks()).map(|rank| office.post(round, rank).now).max();
            self.woken_by(last.unwrap_or(post.now));
        }
        Ok(round)
    }

    /// The region that `rank` brought to a meeting.
    fn brought(&self, round: u64, rank: usize) -> Region {
        let region = self.world.office.post(round, rank).region;
        // SAFETY: the lender has come to the same meeting, which orders its accesses before ours,
        // and is inside the same collective until all ranks have come to the next. Each collective
        // argues where it uses the region that nobody writes what another touches meanwhile.
        unsafe { region.accept() }
    }
}

impl Transport for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.ranks()
    }

    fn hop_mode(&self) -> HopMode {
        self.world.options.hop_mode
    }

    fn share(&self, dev: &dyn Device, memory: &Arc<Memory>) -> Result<()> {
        let memories = || self.world.memories.lock().unwrap_or_else(PoisonError::into_inner);
        memories().push(memory.clone());
        self.come(Collective::Share, None)?;
        memories().iter().for_each(|memory| dev.attach(memory));
        Ok(())
    }

    fn start(&self, _dev: &dyn Device, header: Header, send: Region) -> Result<()> {
        let world = &self.world;
        let to = header.tag.pass.to(self.rank, world.options.ranks);
        let message = Message { header, region: send.lend(), sent: self.clock.now() };
        world
            .office
            .send(self.rank, to, header.channel(), message, world.options.deadline)
            .map_err(|interrupt| self.error(interrupt, header.place(world.options.ranks)))
    }

    fn finish(&self, dev: &dyn Device, expected: Header, into: Option<Region>) -> Result<Region> {
        let Threads { world, rank, .. } = self;
        let (channel, pass) = (expected.channel(), expected.tag.pass);
        let (from, to) =
            (pass.from(*rank, world.options.ranks), pass.to(*rank, world.options.ranks));
        let error = |interrupt| self.error(interrupt, expected.place(world.options.ranks));
        // Hops are numbered across channels: this number elsewhere is a hop of another kind.
        let stray = |message: &Message| message.header.sequence == expected.sequence;
        let Message { header, region, sent } = world
            .office
            .receive(*rank, from, channel, world.options.deadline, stray)
            .map_err(error)?;
        self.check(from, expected, header)?;
        // SAFETY: the mailbox's lock orders the sender's accesses before ours. With `into` set we
        // only read, before we acknowledge, and the sender may not write until then; otherwise what
        // both may do is the contract under "Lent regions" of `Comm`.
        let arrived = unsafe { region.accept() };
        self.woken_by(sent);
        let Some(into) = into else { return Ok(arrived) };
        self.deliver(Some(from), pass, (1, header.bytes), sent);
        if self.copies() && !arrived.is_empty() {
            dev.copy(arrived, into);
        }
        world.office.acknowledge(from, channel, expected.sequence);
        world
            .office
            .acknowledged(*rank, to, channel, expected.sequence, world.options.deadline)
            .map_err(error)?;
        Ok(into)
    }

    fn collective(&self, dev: &dyn Device, pending: &Pending) -> Result<()> {
        let Pending { subject, operation, begun } = pending;
        let ranks = self.ranks();
        let ready = self.line().busy(Pass::Forward).max(*begun);
        let region = operation.shown().lend();
        let now = self.clock.now();
        let post = Post { collective: operation.kind(), subject: *subject, region, ready, now };
        let round = self.meet(post, |rank| operation.shown_bytes(rank))?;
        let slowest = (0..ranks).map(|rank| self.world.office.post(round, rank).ready).max();
        self.deliver(None, Pass::Forward, operation.on_link(ranks), slowest.unwrap_or(ready));
        if !self.copies() {
            return Ok(());
        }
        match operation {
            Operation::AllReduce { x } => self.all_reduce(dev, *subject, *x, round)?,
            Operation::AllGather { parts, mine, all } => {
                self.all_gather(dev, parts, *mine, *all, round);
            }
            Operation::ReduceScatter { parts, all, mine, write } => match mine {
                Some(mine) => self.reduce_scatter(dev, parts, *mine, *write, round),
                None => self.reduce_in_place(dev, parts, *all, round),
            },
            // The root's x is only read, by ranks that each write their own.
            Operation::Broadcast { root, x } if self.rank != *root && !x.is_empty() => {
                dev.copy(self.brought(round, *root), *x);
            }
            Operation::Broadcast { .. } => {}
        }
        self.come(operation.kind(), *subject)
    }

    fn barrier(&self) -> Result<()> {
        self.come(Collective::Barrier, None)
    }

    fn link_times(&self) -> (Duration, Duration) {
        let line = self.line();
        (line.hidden, line.exposed)
    }
}

/// The collectives, between the first meeting of all ranks and the last.
impl Threads {
    /// A meeting that moves no data.
    fn come(&self, collective: Collective, subject: Option<Subject>) -> Result<()> {
        let region = Region::empty(Dtype::F32).lend();
        let now = self.clock.now();
        let post = Post { collective, subject, region, ready: now, now };
        self.meet(post, |_| 0).map(|_| ())
    }

    fn all_reduce(
        &self,
        dev: &dyn Device,
        subject: Option<Subject>,
        x: Region,
        round: u64,
    ) -> Result<()> {
        let ranks = self.ranks();
        // Rank r sums part r of all ranks, in rank 0's memory: until the next meeting no other rank
        // touches that part of any x. From there to the last meeting rank 0's x is only read.
        let part = schedule::part(x.len(), ranks, self.rank);
        let sum = self.brought(round, 0);
        if !part.is_empty() {
            for rank in 1..ranks {
                dev.add(self.brought(round, rank).slice(part.clone()), sum.slice(part.clone()));
            }
        }
        self.come(Collective::AllReduce, subject)?;
        if self.rank != 0 && !x.is_empty() {
            dev.copy(sum, x);
        }
        Ok(())
    }

    fn all_gather(
        &self,
        dev: &dyn Device,
        parts: &Parts,
        mine: Option<Region>,
        all: Region,
        round: u64,
    ) {
        // What a rank shows is only read, or, in place, read where it lies as its owner writes the
        // others' parts.
        for rank in (0..self.ranks()).filter(|rank| mine.is_some() || *rank != self.rank) {
            let theirs = self.brought(round, rank);
            for (whole, part) in parts.segments(rank).filter(|(whole, _)| !whole.is_empty()) {
                let from = if mine.is_some() { part } else { whole.clone() };
                dev.copy(theirs.slice(from), all.slice(whole));
            }
        }
    }

    fn reduce_scatter(
        &self,
        dev: &dyn Device,
        parts: &Parts,
        mine: Region,
        write: Write,
        round: u64,
    ) {
        // Every rank's `all` is only read; `mine` lies outside it and nobody else knows it.
        for rank in 0..self.ranks() {
            let theirs = self.brought(round, rank);
            for (whole, part) in parts.segments(self.rank).filter(|(_, part)| !part.is_empty()) {
                let (from, to) = (theirs.slice(whole), mine.slice(part));
                match write {
                    Write::Set if rank == 0 => dev.copy(from, to),
                    _ => dev.add(from, to),
                }
            }
        }
    }

    fn reduce_in_place(&self, dev: &dyn Device, parts: &Parts, all: Region, round: u64) {
        // Of every `all`, the part of one rank is touched by that rank alone; so it may sum in rank
        // 0's memory, and the order is that of ranks, as for every other sum.
        let sum = self.brought(round, 0);
        for (whole, _) in parts.segments(self.rank).filter(|(whole, _)| !whole.is_empty()) {
            let sum = sum.slice(whole.clone());
            for rank in 1..self.ranks() {
                dev.add(self.brought(round, rank).slice(whole.clone()), sum);
            }
            if self.rank != 0 {
                dev.copy(sum, all.slice(whole));
            }
        }
    }
}
