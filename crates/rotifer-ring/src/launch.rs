//! Starts the ranks.

use std::any::Any;
use std::fmt::Display;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rotifer_device::Clock;

use crate::transport::alike::Alike;
use crate::transport::threads::{Threads, World};
use crate::{Comm, HopMode};

/// A link between neighbours to be simulated, so that what hides a hop can be measured on one
/// machine: full duplex, one message after the other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// From the end of sending to the arrival.
    pub latency: Duration,
    /// How fast it carries.
    pub bytes_per_sec: f64,
}

/// How to run the ranks of one process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Number of ranks; at least one.
    pub ranks: usize,
    /// How hops move shards.
    pub hop_mode: HopMode,
    /// How long a rank waits for another before it calls that one silent.
    pub deadline: Duration,
    /// The link that hops in [`HopMode::Copy`] and collectives (as rings) seem to go over; `None`
    /// for this machine's memory. What is handed over takes no link.
    pub link: Option<Link>,
    /// If time is simulated as well: how, beside what the ranks' devices say. `None` for real time.
    pub simulation: Option<Simulation>,
}

/// What the ranks' messages cost where time is simulated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Simulation {
    /// From handing a message over, or from the last rank's coming to a meeting, until whoever
    /// waits for it goes on: what ranks of one machine pay where no link is in between.
    pub wake: Duration,
    /// Whether ranks copy and add what they receive themselves, as threads of one process do, and
    /// so take their devices' time. If not, a network does.
    pub ranks_copy: bool,
    /// Ranks that are near each other, if not all are: [`Options::link`] is within a node.
    pub nodes: Option<Nodes>,
}

/// Ranks by node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Nodes {
    /// Consecutive ranks that share a node.
    pub ranks: usize,
    /// The link between a rank and one on another node.
    pub between: Link,
}

impl Options {
    /// Shards are handed over, and a rank is silent after 30 s.
    #[must_use]
    pub const fn new(ranks: usize) -> Options {
        let deadline = Duration::from_secs(30);
        Options { ranks, hop_mode: HopMode::HandOver, deadline, link: None, simulation: None }
    }

    /// The link that messages from `from` to `to` go over.
    pub(crate) fn link_of(&self, from: usize, to: usize) -> Option<Link> {
        match self.simulation.and_then(|s| s.nodes) {
            Some(nodes) if from / nodes.ranks != to / nodes.ranks => Some(nodes.between),
            _ => self.link,
        }
    }

    /// The slowest link of the ring, which a collective of all ranks waits for.
    pub(crate) fn slowest_link(&self) -> Option<Link> {
        self.link_of(0, self.ranks - 1)
    }
}

/// Why a run failed: what happened first. What other ranks met as a consequence is not told.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure<E> {
    /// A world of no ranks.
    #[error("0 ranks cannot run anything; ask for 1 or more")]
    NoRanks,
    /// The operating system would not start a thread.
    #[error("rank {rank} could not be started: {cause}; fewer ranks may do")]
    Start {
        /// The rank it was for.
        rank: usize,
        /// What the operating system said.
        cause: io::Error,
    },
    /// A rank returned an error.
    #[error("rank {rank}: {cause}")]
    Failed {
        /// The rank.
        rank: usize,
        /// Its error.
        cause: E,
    },
    /// A rank panicked.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// The rank.
        rank: usize,
        /// The panic's message.
        message: String,
    },
}

/// Runs `run` once for each rank, on threads named `rank-0`, `rank-1` and so on, and returns what
/// they return, by rank. No thread outlives the call.
///
/// ```
/// use rotifer_ring::launch::{self, Options};
/// let ranks = launch::threads(&Options::new(3), |comm| {
///     comm.barrier()?;
///     Ok::<_, rotifer_ring::Error>(comm.rank())
/// })?;
/// assert_eq!(ranks, [0, 1, 2]);
/// # Ok::<(), launch::Failure<rotifer_ring::Error>>(())
/// ```
///
/// # Errors
/// As soon as a rank fails or panics, what the others wait for ends with
/// [`Error::Stopped`](crate::Error::Stopped). When all have returned, the first failure is
/// reported. Fails as well if there are no ranks or a thread cannot be started.
pub fn threads<T: Send, E: Display + Send>(
    options: &Options,
    run: impl Fn(Comm) -> Result<T, E> + Sync,
) -> Result<Vec<T>, Failure<E>> {
    if options.ranks == 0 {
        return Err(Failure::NoRanks);
    }
    let world = Arc::new(World::new(options));
    let mut outcomes = thread::scope(|scope| {
        let (world, run) = (&world, &run);
        let start = |rank| {
            let builder = thread::Builder::new().name(format!("rank-{rank}"));
            builder.spawn_scoped(scope, move || run_rank(world, rank, run)).map_err(|cause| {
                world.fail(rank, &cause.to_string());
                Failure::Start { rank, cause }
            })
        };
        let ranks: Vec<_> = (0..options.ranks).map(start).collect();
        let join = |rank: thread::ScopedJoinHandle<'_, _>| rank.join().expect("panics are caught");
        ranks.into_iter().map(|rank| rank.and_then(join)).collect::<Vec<_>>()
    });
    match world.failed() {
        Some(first) => Err(outcomes.swap_remove(first).err().expect("the failure of this rank")),
        None => outcomes.into_iter().collect(),
    }
}

/// Rank `rank` of a world whose ranks all do the same at the same time, without the others:
/// whatever it waits for arrives when what it sent itself would have, over the slowest link. Stands
/// for a world of any size where time is simulated and no data exists; hops are copies.
///
/// # Panics
/// If the options do not simulate a network, hand over, or have no such rank.
#[must_use]
pub fn alike(rank: usize, options: &Options) -> Comm {
    assert!(rank < options.ranks, "rank {rank} of {}", options.ranks);
    let network = options.simulation.is_some_and(|s| !s.ranks_copy);
    assert!(network, "ranks are alike where a network is simulated");
    assert!(options.hop_mode == HopMode::Copy, "a rank alone has nobody's memory to be handed");
    let clock = Clock::simulated();
    Comm::new(Box::new(Alike::new(*options, rank, clock.clone())), clock)
}

fn run_rank<T, E: Display>(
    world: &Arc<World>,
    rank: usize,
    run: impl Fn(Comm) -> Result<T, E>,
) -> Result<T, Failure<E>> {
    let clock = world.clock();
    let comm = Comm::new(Box::new(Threads::new(world.clone(), rank, clock.clone())), clock);
    // Unwinding can break nothing of `run` that anyone sees: the whole run fails.
    match catch_unwind(AssertUnwindSafe(|| run(comm))) {
        Ok(Ok(value)) => {
            world.end(rank);
            Ok(value)
        }
        Ok(Err(cause)) => {
            world.fail(rank, &cause.to_string());
            Err(Failure::Failed { rank, cause })
        }
        Err(payload) => {
            let message = panic_message(&*payload);
            world.fail(rank, &format!("panicked: {message}"));
            Err(Failure::Panicked { rank, message })
        }
    }
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    let literal = payload.downcast_ref::<&str>().map(|&message| message.to_owned());
    literal
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}
