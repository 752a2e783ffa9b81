//! Shards that are gathered to whole units where they are used: what fully sharded data parallelism
//! (FSDP) moves. The next unit's weights travel while this one computes; a unit's gradients are
//! summed and scattered while the next computes its own.

use std::cell::RefCell;
use std::collections::VecDeque;

use rotifer_device::{Arena, Device, Dtype, Purpose, Region, Write};

use crate::comm::Pending;
use crate::operation::Operation;
use crate::schedule::Pass;
use crate::{Comm, Parts, Result, Subject};

/// One group of a unit where a layer uses it. A model's are numbered in the order of forward;
/// backward uses them in the reverse order.
#[derive(Clone, Debug)]
pub struct Gather {
    /// Number of the unit, for messages.
    pub unit: u32,
    /// How the ranks' shards make the whole.
    pub parts: Parts,
    /// Home of this rank's shard.
    pub weights: Region,
    /// Home of its gradient.
    pub gradients: Region,
    /// A place of its own for the whole, where it stays from forward to backward, and its number.
    /// Uses of the same weights share it.
    pub kept: Option<(usize, Region)>,
    /// Whether backward reads the weights.
    pub backward_reads_weights: bool,
}

/// Where wholes are while they are used, of purpose [`Purpose::Travel`]: two of each, one to
/// compute on and one under way; without overlap one.
#[derive(Clone, Copy, Debug)]
pub struct Spares {
    weights: [Region; 2],
    gradients: [Region; 2],
}

impl Spares {
    /// Takes room for these uses. A world of one takes none: its shards are whole.
    pub fn take(arena: &mut Arena, comm: &Comm, overlap: bool, uses: &[Gather]) -> Spares {
        let none = Region::empty(Dtype::F32);
        if comm.world() == 1 {
            return Spares { weights: [none; 2], gradients: [none; 2] };
        }
        let longest = |uses: &mut dyn Iterator<Item = &Gather>| {
            uses.map(|gather| gather.parts.len()).max().unwrap_or(0)
        };
        let weights = longest(&mut uses.iter().filter(|gather| gather.kept.is_none()));
        let gradients = longest(&mut uses.iter().filter(|gather| !gather.gradients.is_empty()));
        let mut pair = |len| {
            let first = arena.take(Purpose::Travel, Dtype::F32, len);
            [first, if overlap { arena.take(Purpose::Travel, Dtype::F32, len) } else { first }]
        };
        Spares { weights: pair(weights), gradients: pair(gradients) }
    }
}

/// The uses of one rank.
#[derive(Debug)]
pub struct Gathering {
    comm: Comm,
    overlap: bool,
    spares: Spares,
    uses: Vec<Gather>,
    state: RefCell<State>,
}

#[derive(Debug)]
struct State {
    /// Of which use each spare holds the weights, now or when what is under way has arrived.
    held: [Option<usize>; 2],
    /// The spare that is computed on.
    current: usize,
    /// The spare for gradients that is used next.
    next_gradient: usize,
    /// Which kept wholes hold the weights of now.
    valid: Vec<bool>,
    /// Collectives under way, in the order in which they began and so will complete.
    queue: VecDeque<(Under, Pending)>,
}

/// What is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Under {
    /// The weights of a use, to a spare.
    Gather(usize),
    /// Weights to the place where they are kept.
    Keep(usize),
    /// The gradients in a spare.
    Scatter(usize),
}

impl Gather {
    fn under(&self, number: usize) -> Under {
        self.kept.map_or(Under::Gather(number), |(kept, _)| Under::Keep(kept))
    }
}

impl Gathering {
    /// Uses over `comm`. With `overlap` weights and gradients travel while other units compute.
    #[must_use]
    pub fn new(comm: Comm, overlap: bool, spares: Spares, uses: Vec<Gather>) -> Gathering {
        let kept = uses.iter().filter_map(|gather| gather.kept).map(|(number, _)| number + 1);
        let state = State {
            held: [None; 2],
            current: 0,
            next_gradient: 0,
            valid: vec![false; kept.max().unwrap_or(0)],
            // A gather ahead and two scatters; a gather that nobody came for.
            queue: VecDeque::with_capacity(8),
        };
        Gathering { comm, overlap, spares, uses, state: RefCell::new(state) }
    }

    /// The communicator.
    #[must_use]
    pub const fn comm(&self) -> &Comm {
        &self.comm
    }

    /// Gathers the weights of use `number` for a pass, and with overlap begins to gather those of
    /// the next. They stay until the next are asked for; with overlap, until the next but one.
    ///
    /// # Errors
    /// If a rank is silent, out of step or has failed.
    pub fn weights(&self, dev: &dyn Device, pass: Pass, number: usize) -> Result<Region> {
        let gather = &self.uses[number];
        if self.comm.world() == 1 {
            return Ok(gather.weights);
        }
        self.begin_gather(pass, number);
        self.complete(dev, gather.under(number))?;
        let whole = match gather.kept {
            Some((_, whole)) => whole,
            None => {
                let state = &mut *self.state.borrow_mut();
                let slot = state.held.iter().position(|held| *held == Some(number));
                state.current = slot.expect("just gathered");
                self.spares.weights[state.current].first(gather.parts.len())
            }
        };
        let next = match pass {
            Pass::Forward => (number + 1 < self.uses.len()).then_some(number + 1),
            Pass::Backward => (0..number).rev().find(|n| self.uses[*n].backward_reads_weights),
        };
        if let Some(next) = next.filter(|_| self.overlap) {
            self.begin_gather(pass, next);
        }
        Ok(whole)
    }

    /// Lets `work` add to the whole gradient of use `number`, which is zero at first, then begins
    /// to sum it over the ranks into its home.
    ///
    /// # Errors
    /// If a rank is silent, out of step or has failed.
    pub fn gradient(
        &self,
        dev: &dyn Device,
        number: usize,
        work: impl FnOnce(Region),
    ) -> Result<()> {
        let gather = &self.uses[number];
        if self.comm.world() == 1 {
            work(gather.gradients);
            return Ok(());
        }
        let slot = self.state.borrow().next_gradient;
        self.complete(dev, Under::Scatter(slot))?;
        let all = self.spares.gradients[slot].first(gather.parts.len());
        dev.fill(all, 0.0);
        work(all);
        let (parts, write) = (gather.parts.clone(), Write::Add);
        let mine = Some(gather.gradients.first(parts.len_of(self.comm.rank())));
        let subject = Some(Subject { unit: gather.unit, pass: Pass::Backward });
        let scatter = Operation::ReduceScatter { parts, all, mine, write };
        let scatter = self.comm.begin(subject, scatter);
        {
            let state = &mut *self.state.borrow_mut();
            state.queue.push_back((Under::Scatter(slot), scatter));
            state.next_gradient = if self.overlap { 1 - slot } else { slot };
        }
        if self.overlap { Ok(()) } else { self.complete(dev, Under::Scatter(slot)) }
    }

    /// Waits until all gradients are home.
    ///
    /// # Errors
    /// If a rank is silent, out of step or has failed.
    pub fn settle(&self, dev: &dyn Device) -> Result<()> {
        while let Some((_, pending)) = self.pop() {
            self.comm.complete(dev, pending)?;
        }
        Ok(())
    }

    /// Forgets what was gathered: the weights have changed.
    ///
    /// # Errors
    /// As [`settle`](Gathering::settle).
    pub fn refresh(&self, dev: &dyn Device) -> Result<()> {
        self.settle(dev)?;
        let state = &mut *self.state.borrow_mut();
        state.held = [None; 2];
        state.valid.fill(false);
        Ok(())
    }

    /// Begins to gather the weights of a use, unless they are there or on their way.
    fn begin_gather(&self, pass: Pass, number: usize) {
        let gather = &self.uses[number];
        let state = &mut *self.state.borrow_mut();
        let all = match gather.kept {
            Some((kept, whole)) => {
                if std::mem::replace(&mut state.valid[kept], true) {
                    return;
                }
                whole
            }
            None => {
                if state.held.contains(&Some(number)) {
                    return;
                }
                let slot = if self.overlap { 1 - state.current } else { 0 };
                state.held[slot] = Some(number);
                self.spares.weights[slot].first(gather.parts.len())
            }
        };
        let parts = gather.parts.clone();
        let mine = Some(gather.weights.first(parts.len_of(self.comm.rank())));
        let subject = Some(Subject { unit: gather.unit, pass });
        let pending = self.comm.begin(subject, Operation::AllGather { parts, mine, all });
        state.queue.push_back((gather.under(number), pending));
    }

    /// Completes what is under way up to `under`, if it is.
    fn complete(&self, dev: &dyn Device, under: Under) -> Result<()> {
        while self.state.borrow().queue.iter().any(|(what, _)| *what == under) {
            let (_, pending) = self.pop().expect("the queue has it");
            self.comm.complete(dev, pending)?;
        }
        Ok(())
    }

    fn pop(&self) -> Option<(Under, Pending)> {
        self.state.borrow_mut().queue.pop_front()
    }
}
