//! Ranks that are threads of one process.
//!
//! A message is the handle of a region. In [`HopMode::HandOver`] the receiver uses the region where
//! it lies; in [`HopMode::Copy`] it copies it, straight from the sender's memory, and acknowledges.
//! Collectives read the other ranks' memory between two meetings.
//!
//! Every wait checks three things: what it waits for, whether a rank has failed or ended, and the
//! deadline; so nothing here hangs.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rotifer_device::{Device, Dtype, Lent, Memory, Region};

use super::mailbox::{Interrupt, Office};
use super::{Header, Transport};
use crate::error::{Collective, Place};
use crate::launch::Link;
use crate::{Error, HopMode, Result, launch, schedule};

#[derive(Clone, Copy, Debug)]
struct Message {
    header: Header,
    region: Lent,
    /// When it was sent: where a simulated link begins to count.
    sent: Instant,
}

/// What a rank brings to a collective.
#[derive(Clone, Copy, Debug)]
struct Post {
    collective: Collective,
    region: Lent,
}

/// What the ranks of one process share.
#[derive(Debug)]
pub(crate) struct World {
    office: Office<Message, Post>,
    ranks: usize,
    hop_mode: HopMode,
    deadline: Duration,
    link: Option<Link>,
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
            ranks: options.ranks,
            hop_mode: options.hop_mode,
            deadline: options.deadline,
            link: options.link,
            memories: Mutex::default(),
            failure: OnceLock::new(),
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
    /// Per pass, until when the simulated link to this rank carries what was sent before.
    busy: Mutex<[Option<Instant>; 2]>,
}

impl Threads {
    pub const fn new(world: Arc<World>, rank: usize) -> Threads {
        Threads { world, rank, busy: Mutex::new([None; 2]) }
    }

    /// Waits until the simulated link, if there is one, has delivered a message: messages of one
    /// pass share the link one after the other, from when they were sent. It takes no processor, so
    /// what a rank computes meanwhile hides it, as with a network.
    fn deliver(&self, header: Header, sent: Instant) {
        let Some(link) = self.world.link else { return };
        let arrival = {
            let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
            let busy = &mut busy[header.tag.pass as usize];
            let begin = busy.map_or(sent, |until| until.max(sent));
            let end = begin + Duration::from_secs_f64(header.bytes as f64 / link.bytes_per_sec);
            *busy = Some(end);
            end + link.latency
        };
        thread::sleep(arrival.saturating_duration_since(Instant::now()));
    }

    fn error(&self, interrupt: Interrupt, at: Place) -> Error {
        match interrupt {
            Interrupt::Silent(ranks) => Error::Silent { ranks, at, after: self.world.deadline },
            Interrupt::Ended(rank) => Error::Ended { rank, at },
            Interrupt::Stopped => {
                let (rank, cause) = self.world.failure.get().expect("set before waits are ended");
                Error::Stopped { rank: *rank, cause: cause.clone() }
            }
        }
    }

    fn check(&self, from: usize, expected: Header, got: Header) -> Result<()> {
        let place = |header: Header| header.place(self.world.ranks);
        if (got.sequence, got.tag) != (expected.sequence, expected.tag) {
            return Err(Error::Mismatch { rank: from, ours: place(expected), theirs: place(got) });
        }
        if got.bytes != expected.bytes {
            let (expected, got, at) = (expected.bytes, got.bytes, place(expected));
            return Err(Error::Size { rank: from, at, expected, got });
        }
        Ok(())
    }

    /// Brings `region` to a meeting, and checks that all ranks are there for the same thing.
    fn meet(&self, collective: Collective, region: Region) -> Result<u64> {
        let post = Post { collective, region: region.lend() };
        let office = &self.world.office;
        let round = office.come(self.rank, post);
        let place = |collective| Place::Collective { collective, sequence: round };
        office
            .all_here(self.rank, round, self.world.deadline)
            .map_err(|interrupt| self.error(interrupt, place(collective)))?;
        for rank in 0..self.world.ranks {
            let theirs = office.post(round, rank);
            if theirs.collective != collective {
                let (ours, theirs) = (place(collective), place(theirs.collective));
                return Err(Error::Mismatch { rank, ours, theirs });
            }
            let (expected, got) = (region.bytes(), theirs.region.bytes());
            if got != expected {
                return Err(Error::Size { rank, at: place(collective), expected, got });
            }
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
        self.world.ranks
    }

    fn hop_mode(&self) -> HopMode {
        self.world.hop_mode
    }

    fn share(&self, dev: &dyn Device, memory: &Arc<Memory>) -> Result<()> {
        let memories = || self.world.memories.lock().unwrap_or_else(PoisonError::into_inner);
        memories().push(memory.clone());
        self.meet(Collective::Share, NOTHING)?;
        memories().iter().for_each(|memory| dev.attach(memory));
        Ok(())
    }

    fn start(&self, _dev: &dyn Device, header: Header, send: Region) -> Result<()> {
        let world = &self.world;
        let to = header.tag.pass.to(self.rank, world.ranks);
        let message = Message { header, region: send.lend(), sent: Instant::now() };
        world
            .office
            .send(self.rank, to, header.channel(), message, world.deadline)
            .map_err(|interrupt| self.error(interrupt, header.place(world.ranks)))
    }

    fn finish(&self, dev: &dyn Device, expected: Header, into: Option<Region>) -> Result<Region> {
        let Threads { world, rank, .. } = self;
        let (channel, pass) = (expected.channel(), expected.tag.pass);
        let (from, to) = (pass.from(*rank, world.ranks), pass.to(*rank, world.ranks));
        let error = |interrupt| self.error(interrupt, expected.place(world.ranks));
        // Hops are numbered across channels: this number elsewhere is a hop of another kind.
        let stray = |message: &Message| message.header.sequence == expected.sequence;
        let Message { header, region, sent } =
            world.office.receive(*rank, from, channel, world.deadline, stray).map_err(error)?;
        self.check(from, expected, header)?;
        // SAFETY: the mailbox's lock orders the sender's accesses before ours. With `into` set we
        // only read, before we acknowledge, and the sender may not write until then; otherwise what
        // both may do is the contract under "Lent regions" of `Comm`.
        let arrived = unsafe { region.accept() };
        let Some(into) = into else { return Ok(arrived) };
        self.deliver(header, sent);
        if !arrived.is_empty() {
            dev.copy(arrived, into);
        }
        world.office.acknowledge(from, channel, expected.sequence);
        world
            .office
            .acknowledged(*rank, to, channel, expected.sequence, world.deadline)
            .map_err(error)?;
        Ok(into)
    }

    fn all_reduce(&self, dev: &dyn Device, x: Region) -> Result<()> {
        let ranks = self.world.ranks;
        let round = self.meet(Collective::AllReduce, x)?;
        // Rank r sums part r of all ranks, in rank 0's memory: until the next meeting no other rank
        // touches that part of any x. From there to the last meeting rank 0's x is only read.
        let part = schedule::part(x.len(), ranks, self.rank);
        let sum = self.brought(round, 0);
        if !part.is_empty() {
            for rank in 1..ranks {
                dev.add(self.brought(round, rank).slice(part.clone()), sum.slice(part.clone()));
            }
        }
        self.meet(Collective::AllReduce, x)?;
        if self.rank != 0 && !x.is_empty() {
            dev.copy(sum, x);
        }
        self.meet(Collective::AllReduce, x)?;
        Ok(())
    }

    fn all_gather(&self, dev: &dyn Device, mine: Region, all: Region) -> Result<()> {
        let round = self.meet(Collective::AllGather, mine)?;
        if !mine.is_empty() {
            // Every rank's `mine` is only read, and `all` has no byte of it but our own in place.
            for rank in 0..self.world.ranks {
                let part = all.slice(rank * mine.len()..(rank + 1) * mine.len());
                dev.copy(self.brought(round, rank), part);
            }
        }
        self.meet(Collective::AllGather, mine)?;
        Ok(())
    }

    fn reduce_scatter(&self, dev: &dyn Device, all: Region, mine: Region) -> Result<()> {
        let round = self.meet(Collective::ReduceScatter, all)?;
        if !mine.is_empty() {
            // Every rank's `all` is only read; `mine` lies outside it and nobody else knows it.
            let part = self.rank * mine.len()..(self.rank + 1) * mine.len();
            dev.copy(self.brought(round, 0).slice(part.clone()), mine);
            for rank in 1..self.world.ranks {
                dev.add(self.brought(round, rank).slice(part.clone()), mine);
            }
        }
        self.meet(Collective::ReduceScatter, all)?;
        Ok(())
    }

    fn broadcast(&self, dev: &dyn Device, root: usize, x: Region) -> Result<()> {
        let round = self.meet(Collective::Broadcast { root }, x)?;
        // The root's x is only read, by ranks that each write their own.
        if self.rank != root && !x.is_empty() {
            dev.copy(self.brought(round, root), x);
        }
        self.meet(Collective::Broadcast { root }, x)?;
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        self.meet(Collective::Barrier, NOTHING).map(|_| ())
    }
}

/// What a rank brings to a meeting that moves no data.
const NOTHING: Region = Region::empty(Dtype::F32);
