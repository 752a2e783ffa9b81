//! One rank's end of a transport.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rotifer_device::{Clock, Device, Memory, Region, Write};

use crate::operation::Operation;
use crate::schedule::Pass;
use crate::transport::threads::{Threads, World};
use crate::transport::{Header, Transport};
use crate::{Collective, Parts, Result, Subject, launch};

/// How a hop moves a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HopMode {
    /// The handle of the region moves and no byte does. Needs ranks that share an address space.
    HandOver,
    /// The bytes move into a spare buffer, as over a network.
    Copy,
}

/// Which of a pass's two streams of messages: they are in flight at once and do not wait for each
/// other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Shards of weights, or token ids.
    Weights,
    /// Travelling gradients, or rows of an embedding.
    Gradients,
}

/// What a hop carries. Both sides state it, so that ranks that are out of step find out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag {
    /// Number of the unit.
    pub unit: u32,
    /// Which way it hops.
    pub pass: Pass,
    /// The step that the hop follows.
    pub step: u32,
    /// Which stream of messages.
    pub lane: Lane,
}

/// A hop under way, from [`Comm::start`] to [`Comm::finish`].
#[derive(Debug)]
#[must_use = "a hop that is not finished leaves its message to be taken for the next one"]
pub struct Hop {
    /// What must arrive.
    expected: Header,
    into: Option<Region>,
    begun: Duration,
}

/// A hop or a collective of one rank, by its [`Comm::clock`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// What it was.
    pub kind: MessageKind,
    /// When this rank started it.
    pub begin: Duration,
    /// From when on the rank waited for it, or did its share.
    pub waited: Duration,
    /// When it was complete.
    pub end: Duration,
    /// Bytes that arrived (of a collective, that this rank sent, by the [`Traffic`]'s measure).
    pub bytes: u64,
}

/// What a message was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageKind {
    /// A hop.
    Hop(Tag),
    /// A collective, and what it was for.
    Collective(Collective, Option<Subject>),
}

/// What a rank has communicated so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Number of hops started.
    pub num_hops: u64,
    /// Bytes handed on by hops on [`Lane::Weights`], moved or not.
    pub weights_bytes: u64,
    /// Bytes handed on by hops on [`Lane::Gradients`], moved or not.
    pub gradients_bytes: u64,
    /// Bytes that this rank's share of all collectives is: what it would send if each were run as a
    /// ring, rounded down.
    pub collectives_bytes: u64,
    /// Time spent in [`Comm::finish`] and in collectives, copies included: the communication that
    /// computing did not hide. (Waiting for room in [`Comm::start`] is not counted: a ring never
    /// fills a mailbox.)
    pub exposed: Duration,
    /// Time that messages to this rank were under way on the simulated link while it computed.
    pub link_hidden: Duration,
    /// Time that this rank waited for the simulated link; part of `exposed`.
    pub link_exposed: Duration,
}

/// A collective under way, from [`Comm::begin`] to [`Comm::complete`].
#[derive(Debug)]
#[must_use = "the other ranks wait for a collective that was begun"]
pub(crate) struct Pending {
    pub subject: Option<Subject>,
    pub operation: Operation,
    /// From when on this rank is ready for it.
    pub begun: Duration,
}

/// One rank's end of a transport. Clones are the same end; only one thread may use it at a time, as
/// calls must come in one order.
///
/// All ranks must start the same hops and call the same collectives in the same order. Whoever does
/// not is found out by its neighbour (an error that names both sides), or by the deadline.
///
/// # Lent regions
/// What a call is given is read or written by other ranks until a later call returns, so until then
/// the caller must keep to this:
/// - a region handed to a hop in [`HopMode::HandOver`] may still be read, as long as nobody writes
///   to it. To write to it, a rank must be the only one that was handed it, or must have learnt
///   through later messages that the others are done with it. [`Ring`](crate::Ring) is the one
///   caller that relies on this;
/// - in [`HopMode::Copy`] the region sent may be read, and `into` left alone, until
///   [`finish`](Comm::finish) returns;
/// - collectives are done with their regions when they return, or, if they run beside something,
///   when that has been waited for;
/// - after an error all that was lent stays lent: ranks that have not noticed yet may still use it.
#[derive(Clone, Debug)]
pub struct Comm(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    transport: Box<dyn Transport>,
    clock: Clock,
    /// A lock rather than a cell, as a rank may run on a thread of its device's pool. Nobody else
    /// wants it.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    traffic: Traffic,
    units: Vec<String>,
    /// Since when it was asked for.
    messages: Option<Vec<Message>>,
}

impl Comm {
    /// The only rank of a world of one: every call is trivial and none can fail.
    #[must_use]
    pub fn alone() -> Comm {
        let world = World::new(&launch::Options::new(1));
        let clock = world.clock();
        Comm::new(Box::new(Threads::new(Arc::new(world), 0, clock.clone())), clock)
    }

    pub(crate) fn new(transport: Box<dyn Transport>, clock: Clock) -> Comm {
        Comm(Arc::new(Inner { transport, clock, state: Mutex::default() }))
    }

    /// This rank's time. All ranks count from the same moment.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.0.clock
    }

    /// From now on keeps each hop and collective, which takes memory as it goes.
    pub fn record(&self) {
        self.state().messages = Some(Vec::new());
    }

    /// What has been recorded since the last call.
    #[must_use]
    pub fn take_messages(&self) -> Vec<Message> {
        self.state().messages.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// The name of a unit, as [`name_units`](Comm::name_units) gave it.
    #[must_use]
    pub fn unit_name(&self, unit: u32) -> Option<String> {
        self.state().units.get(unit as usize).cloned()
    }

    /// Which rank this is, from 0.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.0.transport.rank()
    }

    /// How many ranks there are.
    #[must_use]
    pub fn world(&self) -> usize {
        self.0.transport.world()
    }

    /// How hops move shards.
    #[must_use]
    pub fn hop_mode(&self) -> HopMode {
        self.0.transport.hop_mode()
    }

    /// Names the units, so that errors do: `names[n]` is that of unit number n.
    pub fn name_units(&self, names: Vec<String>) {
        self.state().units = names;
    }

    /// What this rank has communicated so far.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        let (link_hidden, link_exposed) = self.0.transport.link_times();
        Traffic { link_hidden, link_exposed, ..self.state().traffic }
    }

    /// Makes this rank's memory known to all ranks, and attaches theirs to `dev`, so that it can
    /// read the regions they hand over. A collective. Every memory stays alive until the last rank
    /// is gone, so a rank that fails does not pull its memory from under a reader.
    ///
    /// # Errors
    /// If a rank is silent, calls another collective, has ended or has failed.
    pub fn share(&self, dev: &dyn Device, memory: &Arc<Memory>) -> Result<()> {
        self.exposed(|t| t.share(dev, memory))
    }

    /// Starts one hop: hands `send` to the rank that this pass goes to, and expects `expect`
    /// elements, of the type of `send`, from the other side. Returns at once, unless the neighbour
    /// has left eight messages of this pass and lane lying: then it waits for room.
    ///
    /// `into` is where to put what arrives: `Some` of exactly `expect` elements in
    /// [`HopMode::Copy`], `None` in [`HopMode::HandOver`].
    ///
    /// # Errors
    /// If there is no room within the deadline, or if a rank has failed.
    ///
    /// # Panics
    /// If `into` is not as said.
    ///
    /// # Safety
    /// All ranks must keep to what "Lent regions" says of [`Comm`]: nobody writes to what another
    /// rank may still read or write.
    pub unsafe fn start(
        &self,
        dev: &dyn Device,
        tag: Tag,
        send: Region,
        expect: usize,
        into: Option<Region>,
    ) -> Result<Hop> {
        let fits = match self.hop_mode() {
            HopMode::HandOver => into.is_none(),
            HopMode::Copy => into.is_some_and(|r| r.len() == expect),
        };
        assert!(fits, "{:?} of {expect} elements cannot use {into:?}", self.hop_mode());
        let header = {
            let traffic = &mut self.state().traffic;
            traffic.num_hops += 1;
            match tag.lane {
                Lane::Weights => traffic.weights_bytes += send.bytes() as u64,
                Lane::Gradients => traffic.gradients_bytes += send.bytes() as u64,
            }
            Header { sequence: traffic.num_hops, tag, bytes: send.bytes() }
        };
        self.0.transport.start(dev, header, send).map_err(|e| self.named(e))?;
        let expected = Header { bytes: expect * send.dtype().bytes(), ..header };
        Ok(Hop { expected, into, begun: self.clock().now() })
    }

    /// Waits until the neighbour's region is here and, in [`HopMode::Copy`], ours has been taken.
    /// Returns what arrived: `into`, or the region that was handed over.
    ///
    /// Hops of one pass and lane finish in the order in which they were started.
    ///
    /// # Errors
    /// If the neighbour is silent, has ended or has failed; if what it sent carries another tag,
    /// number or size; or if any rank has failed.
    pub fn finish(&self, dev: &dyn Device, hop: Hop) -> Result<Region> {
        let waited = self.clock().now();
        let arrived = self.exposed(|t| t.finish(dev, hop.expected, hop.into))?;
        let bytes = hop.expected.bytes as u64;
        self.keep(MessageKind::Hop(hop.expected.tag), hop.begun, waited, bytes);
        Ok(arrived)
    }

    /// `x = sum of all ranks' x`, `F32` or `F64`. Each element is summed in the order of ranks,
    /// wherever it lies in `x`, so all ranks get the same bits, however a sum is cut into calls.
    ///
    /// # Errors
    /// If a rank is silent, calls another collective or passes another size, has ended or has
    /// failed.
    pub fn all_reduce(&self, dev: &dyn Device, x: Region) -> Result<()> {
        self.run(dev, None, Operation::AllReduce { x })
    }

    /// As [`all_reduce`](Comm::all_reduce), for `subject`, while `work` runs, which must leave `x`
    /// alone.
    ///
    /// # Errors
    /// As [`all_reduce`](Comm::all_reduce).
    pub fn all_reduce_beside(
        &self,
        dev: &dyn Device,
        subject: Option<Subject>,
        x: Region,
        work: impl FnOnce(),
    ) -> Result<()> {
        let pending = self.begin(subject, Operation::AllReduce { x });
        work();
        self.complete(dev, pending)
    }

    /// `all[q] = mine of rank q`, for parts of equal size. `mine` may be this rank's part of `all`.
    ///
    /// # Errors
    /// As [`all_reduce`](Comm::all_reduce).
    ///
    /// # Panics
    /// If `all` does not have a part for each rank, or if `mine` lies elsewhere in it.
    pub fn all_gather(&self, dev: &dyn Device, mine: Region, all: Region) -> Result<()> {
        let parts = self.even_parts(mine, all);
        let own = all.slice(self.rank() * mine.len()..(self.rank() + 1) * mine.len());
        assert!(
            mine == own || !mine.overlaps(&all),
            "{mine:?} lies in {all:?}, but not at {own:?}"
        );
        let mine = (mine != own).then_some(mine);
        self.run(dev, None, Operation::AllGather { parts, mine, all })
    }

    /// `mine = sum over ranks of their part of all that has this rank's number`, for parts of equal
    /// size, `F32` or `F64`; summed in the order of ranks. `all` keeps its contents.
    ///
    /// # Errors
    /// As [`all_reduce`](Comm::all_reduce).
    ///
    /// # Panics
    /// If `all` does not have a part for each rank, or if `mine` lies in it.
    pub fn reduce_scatter(&self, dev: &dyn Device, all: Region, mine: Region) -> Result<()> {
        let parts = self.even_parts(mine, all);
        assert!(!mine.overlaps(&all), "{mine:?} lies in {all:?}");
        let (mine, write) = (Some(mine), Write::Set);
        self.run(dev, None, Operation::ReduceScatter { parts, all, mine, write })
    }

    /// `x = x of rank root`, any dtype.
    ///
    /// # Errors
    /// As [`all_reduce`](Comm::all_reduce).
    ///
    /// # Panics
    /// If there is no rank `root`.
    pub fn broadcast(&self, dev: &dyn Device, root: usize, x: Region) -> Result<()> {
        assert!(root < self.world(), "broadcast from rank {root} of {}", self.world());
        self.run(dev, None, Operation::Broadcast { root, x })
    }

    /// Waits until all ranks are here.
    ///
    /// # Errors
    /// If a rank is silent, calls another collective, has ended or has failed.
    pub fn barrier(&self) -> Result<()> {
        self.exposed(|t| t.barrier())
    }

    /// Begins a collective. Until [`complete`](Comm::complete) returns, what it shows to the other
    /// ranks may only be read, and what it writes must be left alone. Collectives complete in the
    /// order in which they began.
    pub(crate) fn begin(&self, subject: Option<Subject>, operation: Operation) -> Pending {
        Pending { subject, operation, begun: self.clock().now() }
    }

    /// Waits for a collective that was begun.
    pub(crate) fn complete(&self, dev: &dyn Device, pending: Pending) -> Result<()> {
        let waited = self.clock().now();
        self.exposed(|t| t.collective(dev, &pending))?;
        let bytes = pending.operation.on_link(self.world()).1 as u64;
        self.state().traffic.collectives_bytes += bytes;
        let kind = MessageKind::Collective(pending.operation.kind(), pending.subject);
        self.keep(kind, pending.begun, waited, bytes);
        Ok(())
    }

    /// A collective that nothing runs beside.
    pub(crate) fn run(
        &self,
        dev: &dyn Device,
        subject: Option<Subject>,
        operation: Operation,
    ) -> Result<()> {
        self.complete(dev, self.begin(subject, operation))
    }

    fn even_parts(&self, mine: Region, all: Region) -> Parts {
        assert!(
            all.len() == self.world() * mine.len(),
            "{all:?} is not {} parts of {} elements",
            self.world(),
            mine.len()
        );
        Parts::even(self.world(), mine.len())
    }

    fn exposed<T>(&self, run: impl FnOnce(&dyn Transport) -> Result<T>) -> Result<T> {
        let begin = self.clock().now();
        let result = run(&*self.0.transport);
        self.state().traffic.exposed += self.clock().now() - begin;
        result.map_err(|e| self.named(e))
    }

    /// Records a message that has just ended.
    fn keep(&self, kind: MessageKind, begin: Duration, waited: Duration, bytes: u64) {
        if let Some(messages) = &mut self.state().messages {
            let end = self.clock().now();
            messages.push(Message { kind, begin, waited, end, bytes });
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn named(&self, error: crate::Error) -> crate::Error {
        error.named(&self.state().units)
    }
}
