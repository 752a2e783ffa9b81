//! What can go wrong between ranks.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::schedule::Pass;
use crate::{Lane, Tag};

/// The result of anything that needs other ranks.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A rank that is silent, out of step, or gone.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Ranks that did not answer within the deadline.
    #[error("{} silent: {at}, after {} s", are(ranks), after.as_secs_f64())]
    Silent {
        /// The ranks that were waited for.
        ranks: Vec<usize>,
        /// What was waited for.
        at: Place,
        /// The deadline.
        after: Duration,
    },
    /// A rank that returned without an error while another still needed it: the ranks do not run
    /// the same steps.
    #[error("rank {rank} has ended, but is waited for: {at}")]
    Ended {
        /// The rank that is gone.
        rank: usize,
        /// What was waited for.
        at: Place,
    },
    /// Two ranks that are not at the same place: they do not run the same steps.
    #[error("out of step: this rank is at {ours}, but rank {rank} is at {theirs}")]
    Mismatch {
        /// The other rank.
        rank: usize,
        /// Where this rank is.
        ours: Box<Place>,
        /// Where the other rank is.
        theirs: Box<Place>,
    },
    /// Two ranks that do not agree on a size: they do not run the same model or batch.
    #[error("sizes differ: rank {rank} sent {got} bytes, this rank expects {expected}: {at}")]
    Size {
        /// The other rank.
        rank: usize,
        /// Where both are.
        at: Place,
        /// Bytes that this rank expects.
        expected: usize,
        /// Bytes that the other sent.
        got: usize,
    },
    /// Another rank failed, so this one cannot go on. Never the first cause.
    #[error("stopped, because rank {rank} failed: {cause}")]
    Stopped {
        /// The rank that failed first.
        rank: usize,
        /// What it said.
        cause: Arc<str>,
    },
}

impl Error {
    /// Whether this only follows from another rank's failure.
    #[must_use]
    pub const fn is_consequence(&self) -> bool {
        matches!(self, Error::Stopped { .. })
    }

    /// The same error with units called by their names.
    pub(crate) fn named(mut self, names: &[String]) -> Error {
        match &mut self {
            Error::Silent { at, .. } | Error::Ended { at, .. } | Error::Size { at, .. } => {
                at.name(names);
            }
            Error::Mismatch { ours, theirs, .. } => {
                ours.name(names);
                theirs.name(names);
            }
            Error::Stopped { .. } => {}
        }
        self
    }
}

/// Where in a step a rank is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Place {
    /// In a hop.
    Hop {
        /// Name of the unit, if units have been named.
        unit: Option<Box<str>>,
        /// What the hop carries.
        tag: Tag,
        /// Number of ranks.
        world: usize,
        /// Number of the hop, from 1.
        sequence: u64,
    },
    /// In a collective.
    Collective {
        /// Name of the unit, if it is for one and units have been named.
        unit: Option<Box<str>>,
        /// What it is for, if it is for a unit.
        subject: Option<Subject>,
        /// Which one.
        collective: Collective,
        /// Number of the meeting, from 1. A collective has up to three.
        sequence: u64,
    },
}

impl Place {
    fn name(&mut self, names: &[String]) {
        let (unit, number) = match self {
            Place::Hop { unit, tag, .. } => (unit, tag.unit),
            Place::Collective { unit, subject: Some(subject), .. } => (unit, subject.unit),
            Place::Collective { .. } => return,
        };
        *unit = names.get(number as usize).map(|name| name.as_str().into());
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Hop { unit, tag, world, sequence } => {
                write_unit(f, unit.as_deref(), tag.unit, tag.pass)?;
                let lane = match tag.lane {
                    Lane::Weights => "weights",
                    Lane::Gradients => "gradients",
                };
                write!(f, " step {}/{world}, {lane}, sequence {sequence}", tag.step)
            }
            Place::Collective { unit, subject, collective, sequence } => {
                if let Some(Subject { unit: number, pass }) = *subject {
                    write_unit(f, unit.as_deref(), number, pass)?;
                    f.write_str(" ")?;
                }
                write!(f, "{collective}, sequence {sequence}")
            }
        }
    }
}

fn write_unit(
    f: &mut fmt::Formatter<'_>,
    name: Option<&str>,
    number: u32,
    pass: Pass,
) -> fmt::Result {
    match name {
        Some(name) => write!(f, "unit {name}, ")?,
        None => write!(f, "unit number {number}, ")?,
    }
    f.write_str(match pass {
        Pass::Forward => "forward",
        Pass::Backward => "backward",
    })
}

/// What a collective is for. Both are compared, so that ranks that are out of step find out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Subject {
    /// Number of the unit; of several, the first.
    pub unit: u32,
    /// The pass that it belongs to.
    pub pass: Pass,
}

/// A call that all ranks make together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Collective {
    /// [`Comm::share`](crate::Comm::share)
    Share,
    /// [`Comm::all_reduce`](crate::Comm::all_reduce)
    AllReduce,
    /// [`Comm::all_gather`](crate::Comm::all_gather)
    AllGather,
    /// [`Comm::reduce_scatter`](crate::Comm::reduce_scatter)
    ReduceScatter,
    /// [`Comm::broadcast`](crate::Comm::broadcast)
    Broadcast {
        /// The rank whose region all get.
        root: usize,
    },
    /// [`Comm::barrier`](crate::Comm::barrier)
    Barrier,
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Collective::Share => f.write_str("share"),
            Collective::AllReduce => f.write_str("all-reduce"),
            Collective::AllGather => f.write_str("all-gather"),
            Collective::ReduceScatter => f.write_str("reduce-scatter"),
            Collective::Broadcast { root } => write!(f, "broadcast from rank {root}"),
            Collective::Barrier => f.write_str("barrier"),
        }
    }
}

/// `rank 3 is` or `ranks 1, 3 are`.
fn are(ranks: &[usize]) -> String {
    match ranks {
        [rank] => format!("rank {rank} is"),
        _ => {
            let ranks: Vec<_> = ranks.iter().map(usize::to_string).collect();
            format!("ranks {} are", ranks.join(", "))
        }
    }
}
