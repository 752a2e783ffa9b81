//! One rank that stands for a whole world in which all do the same.
//!
//! What it sends is what its neighbour would have sent it. With no other rank there is nothing to
//! wait for but time, and no data: see [`launch::alike`](crate::launch::alike).

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rotifer_device::{Clock, Device, Memory, Region};

use super::line::Line;
use super::mailbox::NUM_CHANNELS;
use super::{Header, Transport};
use crate::comm::Pending;
use crate::schedule::Pass;
use crate::{HopMode, Result, launch};

/// The rank.
#[derive(Debug)]
pub(crate) struct Alike {
    options: launch::Options,
    rank: usize,
    clock: Clock,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    line: Line,
    /// When what is on its way was sent, by channel.
    sent: [VecDeque<Duration>; NUM_CHANNELS],
}

impl Alike {
    pub fn new(options: launch::Options, rank: usize, clock: Clock) -> Alike {
        Alike { options, rank, clock, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deliver(&self, pass: Pass, size: (u32, usize), sent: Duration) {
        if let Some(link) = self.options.slowest_link() {
            let now = self.clock.now();
            self.clock.wait_until(self.state().line.carry(link, pass, size, sent, now));
        }
    }
}

impl Transport for Alike {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.options.ranks
    }

    fn hop_mode(&self) -> HopMode {
        self.options.hop_mode
    }

    fn share(&self, dev: &dyn Device, memory: &Arc<Memory>) -> Result<()> {
        dev.attach(memory);
        Ok(())
    }

    fn start(&self, _dev: &dyn Device, header: Header, _send: Region) -> Result<()> {
        self.state().sent[header.channel()].push_back(self.clock.now());
        Ok(())
    }

    fn finish(&self, _dev: &dyn Device, expected: Header, into: Option<Region>) -> Result<Region> {
        let sent = self.state().sent[expected.channel()].pop_front();
        let sent = sent.expect("hops finish after they were started");
        self.deliver(expected.tag.pass, (1, expected.bytes), sent);
        Ok(into.expect("hops are copies"))
    }

    fn collective(&self, _dev: &dyn Device, pending: &Pending) -> Result<()> {
        let busy = self.state().line.busy(Pass::Forward);
        let ready = pending.begun.max(busy);
        let size = pending.operation.on_link(self.options.ranks);
        self.deliver(Pass::Forward, size, ready);
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        Ok(())
    }

    fn link_times(&self) -> (Duration, Duration) {
        let line = &self.state().line;
        (line.hidden, line.exposed)
    }
}
