//! What ranks do together.

use rotifer_device::{Region, Write};

use crate::{Collective, Parts};

/// A collective with what this rank brings to it. All ranks bring the same kind and agree on sizes.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    /// `x = sum of all ranks' x`.
    AllReduce { x: Region },
    /// `all = every rank's part`. `mine` is this rank's, compact; `None` if it is in `all` already.
    AllGather { parts: Parts, mine: Option<Region>, all: Region },
    /// `mine = sum of all ranks' part of all that is this rank's`, or `+=`. `mine` is compact and
    /// outside of all, which keeps its contents; `None` if the sum replaces this rank's part of its
    /// own `all`, of which the other parts then hold nothing of use.
    ReduceScatter { parts: Parts, all: Region, mine: Option<Region>, write: Write },
    /// `x = x of rank root`.
    Broadcast { root: usize, x: Region },
}

impl Operation {
    pub const fn kind(&self) -> Collective {
        match self {
            Operation::AllReduce { .. } => Collective::AllReduce,
            Operation::AllGather { .. } => Collective::AllGather,
            Operation::ReduceScatter { .. } => Collective::ReduceScatter,
            Operation::Broadcast { root, .. } => Collective::Broadcast { root: *root },
        }
    }

    /// What the other ranks read of this one.
    pub fn shown(&self) -> Region {
        match self {
            Operation::AllReduce { x } | Operation::Broadcast { x, .. } => *x,
            Operation::AllGather { mine, all, .. } => mine.unwrap_or(*all),
            Operation::ReduceScatter { all, .. } => *all,
        }
    }

    /// Bytes that rank `rank` must show.
    pub fn shown_bytes(&self, rank: usize) -> usize {
        match self {
            Operation::AllGather { parts, mine: Some(mine), .. } => {
                parts.len_of(rank) * mine.dtype().bytes()
            }
            _ => self.shown().bytes(),
        }
    }

    /// What a rank sends if this is done with the fewest bytes: messages that wait for each other,
    /// and the bytes of all. The bytes are those of a ring; the messages are as many as a tree or
    /// recursive halving needs, which large worlds use for that reason.
    pub fn on_link(&self, world: usize) -> (u32, usize) {
        let others = world - 1;
        let depth = usize::BITS - others.leading_zeros();
        match self {
            Operation::AllReduce { x } => (2 * depth, 2 * others * x.bytes() / world),
            Operation::AllGather { all, .. } | Operation::ReduceScatter { all, .. } => {
                (depth, others * all.bytes() / world)
            }
            Operation::Broadcast { x, .. } => (depth, others * x.bytes() / world),
        }
    }
}
