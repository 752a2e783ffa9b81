//! The rotation.
//!
//! [`Ring::forward`] and [`Ring::backward`] take one unit round the ring by the steps of
//! [`schedule`](crate::schedule), and call back with each shard that passes. A hop takes one of
//! three forms:
//!
//! | form       | chosen by           | what a hop does           | spare      | hops        |
//! |------------|---------------------|---------------------------|------------|-------------|
//! | hand over  | `HopMode::HandOver` | moves the handle          | none       | N-1, N-1, N |
//! | overlapped | `Copy`, overlap     | copies into a spare       | 2+2 shards | N-1 each    |
//! | in place   | `Copy`, no overlap  | full circle, slot to slot | one chunk  | N each      |
//!
//! (Hops of weights forward, of weights backward, of gradients.)
//!
//! The overlapped form is the paper's out-of-place RTP: a hop travels while the shard is computed
//! on, if the transport has someone to carry it (ranks as threads copy when a hop is finished). The
//! in-place form blocks, and needs no spare shard. Handing over is what ranks that share an address
//! space do; its extra gradient hop moves no byte.

use std::cell::RefCell;

use rotifer_device::{Arena, Device, Dtype, Purpose, Region};

use crate::schedule::{Cut, Pass};
use crate::{Comm, Hop, HopMode, Lane, Result, Tag};

/// Elements of the chunk that shards pass through in the in-place form: 256 KiB, large enough to
/// hide a message's fixed cost, small enough not to count.
const CHUNK: usize = 64 * 1024;

/// The largest things that will travel, in elements. Collected while a model is built.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TravelNeed {
    /// On the weights' lane: shards of weights, or token ids.
    pub weights: usize,
    /// On the gradients' lane: travelling gradients, or rows of an embedding.
    pub gradients: usize,
}

impl TravelNeed {
    /// Makes room for `weights` and `gradients` elements as well.
    pub fn include(&mut self, weights: usize, gradients: usize) {
        self.weights = self.weights.max(weights);
        self.gradients = self.gradients.max(gradients);
    }
}

/// The buffers that shards travel through, of purpose [`Purpose::Travel`].
#[derive(Clone, Copy, Debug)]
pub enum Travel {
    /// Handles move; there is no buffer.
    HandOver,
    /// Two per lane: one being computed on and sent, one being received.
    Overlapped {
        /// For weights.
        weights: [Region; 2],
        /// For gradients.
        gradients: [Region; 2],
    },
    /// One chunk that shards pass through on their way from slot to slot.
    InPlace {
        /// The chunk.
        chunk: Region,
    },
}

impl Travel {
    /// Takes the buffers for `need` from an arena. A world of one takes none.
    pub fn take(arena: &mut Arena, comm: &Comm, overlap: bool, need: TravelNeed) -> Travel {
        if comm.world() == 1 || comm.hop_mode() == HopMode::HandOver {
            return Travel::HandOver;
        }
        let mut take = |len| arena.take(Purpose::Travel, Dtype::F32, len);
        if overlap {
            Travel::Overlapped {
                weights: [take(need.weights), take(need.weights)],
                gradients: [take(need.gradients), take(need.gradients)],
            }
        } else {
            Travel::InPlace { chunk: take(CHUNK.min(need.weights.max(need.gradients))) }
        }
    }
}

/// One group of a unit's shards, as one rank holds it.
#[derive(Clone, Copy, Debug)]
pub struct Shards {
    /// Number of the unit, for messages.
    pub unit: u32,
    /// How the unit is cut.
    pub cut: Cut,
    /// Which group of the cut.
    pub group: usize,
    /// Elements of one row.
    pub width: usize,
    /// Home of this rank's shard; as large as the largest shard of the cut.
    pub weights: Region,
    /// Home of its gradient, equally large; empty if the unit is not trained.
    pub gradients: Region,
    /// Whether backward reads the weights. An embedding's does not, so only its gradients travel.
    pub backward_reads_weights: bool,
}

impl Shards {
    fn len(&self, k: usize) -> usize {
        self.cut.shard(self.group, k).len() * self.width
    }
}

/// One slice of the batch that visits all ranks: see [`Ring::tour`].
#[derive(Clone, Copy, Debug)]
pub struct Tour {
    /// Number of the unit, for messages.
    pub unit: u32,
    /// Token ids, `I32`; as many as the largest slice has.
    pub ids: Region,
    /// A row for each id; as many as the largest slice has.
    pub rows: Region,
    /// Elements of one row.
    pub width: usize,
    /// Whether the rows are changed on the way and must come back.
    pub bring_back: bool,
}

/// A rank's ring: its communicator, its travel buffers, and a gradient that may still be on its
/// way.
#[derive(Debug)]
pub struct Ring {
    comm: Comm,
    overlap: bool,
    travel: Travel,
    /// The last hop of a backward pass brings a gradient home. It is waited for only when the next
    /// pass has computed its first step, so it too travels behind a product.
    homecoming: RefCell<Option<Homecoming>>,
}

#[derive(Debug)]
struct Homecoming {
    hop: Hop,
    /// Where to add what arrives; `None` if the handle of the home region itself comes back.
    add_to: Option<Region>,
}

impl Ring {
    /// A ring over `comm` with these travel buffers.
    #[must_use]
    pub const fn new(comm: Comm, overlap: bool, travel: Travel) -> Ring {
        Ring { comm, overlap, travel, homecoming: RefCell::new(None) }
    }

    /// The communicator.
    #[must_use]
    pub const fn comm(&self) -> &Comm {
        &self.comm
    }

    /// Takes every shard past this rank once: `visit(k, weights)` for each, this rank's own first.
    ///
    /// # Errors
    /// If a neighbour is silent, out of step or has failed.
    pub fn forward(
        &self,
        dev: &dyn Device,
        shards: &Shards,
        mut visit: impl FnMut(usize, Region),
    ) -> Result<()> {
        let (rank, world) = (self.comm.rank(), self.comm.world());
        let pass = Pass::Forward;
        if let Travel::InPlace { chunk } = self.travel {
            for step in 0..world {
                let k = pass.shard(rank, step, world);
                visit(k, shards.weights.first(shards.len(k)));
                let tag = tag(shards.unit, pass, step, Lane::Weights);
                let next = shards.len(pass.shard(rank, step + 1, world));
                self.pass_on(dev, tag, shards.weights, shards.len(k), next, chunk)?;
            }
            return Ok(());
        }
        let mut held = shards.weights.first(shards.len(rank));
        for step in 0..world {
            let k = pass.shard(rank, step, world);
            if step + 1 == world {
                visit(k, held);
                break;
            }
            let tag = tag(shards.unit, pass, step, Lane::Weights);
            let next = shards.len(pass.shard(rank, step + 1, world));
            held = self.hop_beside(dev, tag, held, next, || visit(k, held))?;
        }
        Ok(())
    }

    /// Takes every shard and its gradient past this rank once, this rank's own first: for each,
    /// `data(k, weights)` while the gradient travels, then `add(k, weights, gradient)`, which adds
    /// this rank's contribution. The sum of all contributions ends in the gradient's home, at the
    /// latest when [`settle`](Ring::settle) returns.
    ///
    /// If the unit's backward does not read weights, the callbacks get an empty region instead,
    /// except for this rank's own shard.
    ///
    /// # Errors
    /// If a neighbour is silent, out of step or has failed.
    pub fn backward(
        &self,
        dev: &dyn Device,
        shards: &Shards,
        mut data: impl FnMut(usize, Region),
        mut add: impl FnMut(usize, Region, Region),
    ) -> Result<()> {
        if let Travel::InPlace { chunk } = self.travel {
            return self.backward_in_place(dev, shards, chunk, data, add);
        }
        let (rank, world) = (self.comm.rank(), self.comm.world());
        // A gradient that is handed over starts at home, and so makes one hop more than one that is
        // copied, which starts as zeros at the shard's first visit.
        let first_hop = usize::from(matches!(self.travel, Travel::Overlapped { .. }));
        let mut weights = shards.weights.first(shards.len(rank));
        let mut on_its_way = None;
        for step in 0..world {
            let k = Pass::Backward.shard(rank, step, world);
            let early =
                if self.overlap { self.weights_on(dev, shards, step, weights)? } else { None };
            data(k, weights);
            if step == 0 {
                // The last gradient has travelled behind `data`. It may be this very unit's, whose
                // home `add` is about to write, and it holds the spares that this pass needs.
                self.settle(dev)?;
            }
            let gradient = match on_its_way.take() {
                Some(hop) => self.comm.finish(dev, hop)?,
                None if step == 0 => shards.gradients.first(shards.len(k)),
                None => self.fresh_gradient(dev, step, shards.len(k)),
            };
            add(k, weights, gradient);
            if world > 1 && step >= first_hop {
                let tag = tag(shards.unit, Pass::Backward, step, Lane::Gradients);
                let next = shards.len(Pass::Backward.shard(rank, step + 1, world));
                let into = self.spare(Lane::Gradients, step + 1, next);
                on_its_way = Some(self.depart(dev, tag, gradient, next, into)?);
            }
            let late =
                if self.overlap { None } else { self.weights_on(dev, shards, step, weights)? };
            weights = match early.or(late) {
                Some(hop) => self.comm.finish(dev, hop)?,
                None => Region::empty(Dtype::F32),
            };
        }
        if let Some(hop) = on_its_way {
            let add_to = (first_hop == 1).then(|| shards.gradients.first(shards.len(rank)));
            *self.homecoming.borrow_mut() = Some(Homecoming { hop, add_to });
        }
        Ok(())
    }

    /// Starts the backward hop of the weights held at `step`, unless nobody is left to read them.
    fn weights_on(
        &self,
        dev: &dyn Device,
        shards: &Shards,
        step: usize,
        held: Region,
    ) -> Result<Option<Hop>> {
        let (rank, world) = (self.comm.rank(), self.comm.world());
        if step + 1 == world || !shards.backward_reads_weights {
            return Ok(None);
        }
        let tag = tag(shards.unit, Pass::Backward, step, Lane::Weights);
        let next = shards.len(Pass::Backward.shard(rank, step + 1, world));
        self.depart(dev, tag, held, next, self.spare(Lane::Weights, step, next)).map(Some)
    }

    /// Where the overlapped form begins the sum of a shard's gradient: a spare, zeroed.
    fn fresh_gradient(&self, dev: &dyn Device, step: usize, len: usize) -> Region {
        let fresh = self.spare(Lane::Gradients, step, len);
        let fresh = fresh.expect("a gradient that is handed over is never begun away from home");
        dev.fill(fresh, 0.0);
        fresh
    }

    /// Waits until the last gradient that is still travelling is home.
    ///
    /// # Errors
    /// If the neighbour that holds it is silent, out of step or has failed.
    pub fn settle(&self, dev: &dyn Device) -> Result<()> {
        let Some(Homecoming { hop, add_to }) = self.homecoming.borrow_mut().take() else {
            return Ok(());
        };
        let arrived = self.comm.finish(dev, hop)?;
        if let Some(home) = add_to {
            dev.add(arrived, home);
        }
        Ok(())
    }

    /// Takes every rank's slice of ids and rows past this rank once, this rank's own first:
    /// `visit(ids, rows)` for each. For weights that stay at home because the batch is the smaller
    /// thing to move. `len(k)` is the number of ids of rank k's slice.
    ///
    /// # Errors
    /// If a neighbour is silent, out of step or has failed.
    pub fn tour(
        &self,
        dev: &dyn Device,
        pass: Pass,
        tour: &Tour,
        len: impl Fn(usize) -> usize,
        mut visit: impl FnMut(Region, Region),
    ) -> Result<()> {
        let (rank, world) = (self.comm.rank(), self.comm.world());
        self.settle(dev)?;
        let len = |step| len(pass.shard(rank, step % world, world));
        // Only copies that nobody waits for may end their journey one hop before home.
        let copied = matches!(self.travel, Travel::Overlapped { .. });
        let hops = if copied && !tour.bring_back { world - 1 } else { world };
        let (mut ids, mut rows) = (tour.ids.first(len(0)), tour.rows.first(len(0) * tour.width));
        for step in 0..world {
            visit(ids, rows);
            if world == 1 || step >= hops {
                break;
            }
            let tag = |lane| tag(tour.unit, pass, step, lane);
            let (have, next) = (len(step), len(step + 1));
            if let Travel::InPlace { chunk } = self.travel {
                let (w, chunk_ids) = (tour.width, chunk.cast(Dtype::I32));
                self.pass_on(dev, tag(Lane::Weights), tour.ids, have, next, chunk_ids)?;
                self.pass_on(dev, tag(Lane::Gradients), tour.rows, have * w, next * w, chunk)?;
                (ids, rows) = (tour.ids.first(next), tour.rows.first(next * w));
                continue;
            }
            let home = (copied && step + 1 == world).then_some((tour.ids, tour.rows));
            let into_ids = match home {
                Some((ids, _)) => Some(ids.first(next)),
                None => self.spare(Lane::Weights, step, next).map(|r| r.cast(Dtype::I32)),
            };
            let into_rows = match home {
                Some((_, rows)) => Some(rows.first(next * tour.width)),
                None => self.spare(Lane::Gradients, step, next * tour.width),
            };
            let hop_ids = self.depart(dev, tag(Lane::Weights), ids, next, into_ids)?;
            let n = next * tour.width;
            let hop_rows = self.depart(dev, tag(Lane::Gradients), rows, n, into_rows)?;
            ids = self.comm.finish(dev, hop_ids)?;
            rows = self.comm.finish(dev, hop_rows)?;
        }
        Ok(())
    }

    /// Hops `held` on and receives the next shard, while (or, without overlap, after) `work` runs.
    fn hop_beside(
        &self,
        dev: &dyn Device,
        tag: Tag,
        held: Region,
        next: usize,
        work: impl FnOnce(),
    ) -> Result<Region> {
        let into = self.spare(tag.lane, tag.step as usize, next);
        if self.overlap {
            let hop = self.depart(dev, tag, held, next, into)?;
            work();
            self.comm.finish(dev, hop)
        } else {
            work();
            let hop = self.depart(dev, tag, held, next, into)?;
            self.comm.finish(dev, hop)
        }
    }

    /// Starts a hop.
    fn depart(
        &self,
        dev: &dyn Device,
        tag: Tag,
        send: Region,
        expect: usize,
        into: Option<Region>,
    ) -> Result<Hop> {
        // SAFETY: what may be done with a region that has been handed over. Weights and the slices
        // of a backward tour are only read on their way; their home writes them again after a
        // gradient of the same step, or the slice itself, has come back, which it does last. A
        // gradient or the rows of a forward tour belong to the rank that holds the handle, and a
        // rank that has sent one on does not touch it before it returns: `backward` settles before
        // it adds to a home. Copies are taken before `finish` returns, and until then the sender
        // only reads.
        unsafe { self.comm.start(dev, tag, send, expect, into) }
    }

    /// Of the two spares of a lane, the one that a hop of this step may fill.
    fn spare(&self, lane: Lane, step: usize, len: usize) -> Option<Region> {
        let Travel::Overlapped { weights, gradients } = &self.travel else { return None };
        let pair = if lane == Lane::Weights { weights } else { gradients };
        Some(pair[step % 2].first(len))
    }

    fn backward_in_place(
        &self,
        dev: &dyn Device,
        shards: &Shards,
        chunk: Region,
        mut data: impl FnMut(usize, Region),
        mut add: impl FnMut(usize, Region, Region),
    ) -> Result<()> {
        let (rank, world) = (self.comm.rank(), self.comm.world());
        for step in 0..world {
            let k = Pass::Backward.shard(rank, step, world);
            let (have, next) =
                (shards.len(k), shards.len(Pass::Backward.shard(rank, step + 1, world)));
            let held = if shards.backward_reads_weights || step == 0 {
                shards.weights.first(have)
            } else {
                Region::empty(Dtype::F32)
            };
            data(k, held);
            add(k, held, shards.gradients.first(have));
            let tag = |lane| tag(shards.unit, Pass::Backward, step, lane);
            if shards.backward_reads_weights {
                self.pass_on(dev, tag(Lane::Weights), shards.weights, have, next, chunk)?;
            }
            self.pass_on(dev, tag(Lane::Gradients), shards.gradients, have, next, chunk)?;
        }
        Ok(())
    }

    /// Sends the first `have` elements of a slot on and replaces them by the `next` that arrive,
    /// chunk by chunk: a chunk is overwritten once the neighbour has taken it.
    fn pass_on(
        &self,
        dev: &dyn Device,
        tag: Tag,
        slot: Region,
        have: usize,
        next: usize,
        chunk: Region,
    ) -> Result<()> {
        // All ranks count chunks of the slot, whose size they share, so messages pair up even where
        // shards differ by a row; those past a shard's end are empty.
        for at in (0..slot.len()).step_by(chunk.len()) {
            let end = at + chunk.len();
            let out = slot.slice(at.min(have)..end.min(have));
            let into = chunk.first(end.min(next) - at.min(next));
            let hop = self.depart(dev, tag, out, into.len(), Some(into))?;
            let arrived = self.comm.finish(dev, hop)?;
            dev.copy(arrived, slot.slice(at.min(next)..end.min(next)));
        }
        Ok(())
    }
}

fn tag(unit: u32, pass: Pass, step: usize, lane: Lane) -> Tag {
    Tag { unit, pass, step: u32::try_from(step).expect("a step below the world's size"), lane }
}
