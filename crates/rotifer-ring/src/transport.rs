//! The ways in which ranks reach each other, one file each.

pub(crate) mod alike;
mod line;
pub(crate) mod mailbox;
pub(crate) mod threads;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rotifer_device::{Device, Memory, Region};

use crate::comm::Pending;
use crate::error::Place;
use crate::{HopMode, Result, Tag};

/// What a message says of itself, and what its receiver expects it to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Number of the hop among all of its rank, from 1.
    pub sequence: u64,
    pub tag: Tag,
    pub bytes: usize,
}

impl Header {
    /// Where a rank is that sends or expects this.
    pub const fn place(&self, world: usize) -> Place {
        Place::Hop { unit: None, tag: self.tag, world, sequence: self.sequence }
    }

    /// Which queue: hops that share a pass and a lane keep their order, others overtake.
    pub const fn channel(&self) -> usize {
        self.tag.pass as usize * 2 + self.tag.lane as usize
    }
}

/// One rank's connection to the others: what each file of this module implements. The calls mean
/// what those of [`Comm`](crate::Comm) say, which has checked the arguments that are local. Errors
/// leave units unnamed.
pub(crate) trait Transport: fmt::Debug + Send + Sync {
    fn rank(&self) -> usize;
    fn world(&self) -> usize;
    fn hop_mode(&self) -> HopMode;
    fn share(&self, dev: &dyn Device, memory: &Arc<Memory>) -> Result<()>;
    fn start(&self, dev: &dyn Device, header: Header, send: Region) -> Result<()>;
    fn finish(&self, dev: &dyn Device, expected: Header, into: Option<Region>) -> Result<Region>;
    /// Runs a collective that was begun.
    fn collective(&self, dev: &dyn Device, pending: &Pending) -> Result<()>;
    fn barrier(&self) -> Result<()>;
    /// See [`Traffic`](crate::Traffic): hidden, then exposed time of a simulated link.
    fn link_times(&self) -> (Duration, Duration);
}
