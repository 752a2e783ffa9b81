//! How shards meet data.
//!
//! A layer is the maths of one shard ([`Sharded`]); a strategy decides who holds which shards and
//! which part of the batch, what moves, and drives the layer over the shards. All five run the same
//! layers on the same kernels, so that what differs between them is the strategy alone:
//!
//! | strategy | a rank holds | and sees | moves, per rank and step |
//! |---|---|---|---|
//! | [`rotated`] | 1/N of all | 1/N of the batch | 3 (N-1)/N of weights, shard by shard |
//! | [`replicated`] (ddp) | all | 1/N of the batch | 2 (N-1)/N of gradients |
//! | [`replicated`] (zero1) | all, 1/N of the optimiser state | 1/N of the batch | the same |
//! | [`gathered`] (fsdp) | 1/N of all, two whole units | 1/N of the batch | 3 (N-1)/N of weights |
//! | [`stationary`] (tp) | 1/N of all | the whole batch | activations of the batch, 4 per block |

pub mod gathered;
pub mod replicated;
pub mod rotated;
pub mod stationary;

use std::cell::Cell;
use std::fmt;

use rotifer_device::{Arena, Device, Region, Write};
use rotifer_ring::{Comm, Gathering, Replicas, Ring, Spares, Travel};

use crate::build::{BuildOptions, Builder, Built, Unit};
use crate::error::Result;
use crate::layer::{Context, Layer};
use crate::sharded::{Sharded, Span, Visit};
pub use stationary::Stationary;

/// The strategies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// Rotated tensor parallelism: shards of the weights travel round the ranks.
    #[default]
    Rtp,
    /// Data parallelism: every rank has all weights, gradients are summed.
    Ddp,
    /// The same, with the optimiser state and its work shared (ZeRO stage 1).
    Zero1,
    /// Fully sharded data parallelism: units are gathered where they are used (ZeRO stage 3).
    Fsdp,
    /// Tensor parallelism: shards stay, every rank sees the whole batch.
    Tp,
}

impl Strategy {
    /// The name that configs and reports use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Strategy::Rtp => "rtp",
            Strategy::Ddp => "ddp",
            Strategy::Zero1 => "zero1",
            Strategy::Fsdp => "fsdp",
            Strategy::Tp => "tp",
        }
    }

    /// Whether a rank holds whole units.
    #[must_use]
    pub const fn holds_all(self) -> bool {
        matches!(self, Strategy::Ddp | Strategy::Zero1)
    }

    /// Into how many slices the batch is cut for `world` ranks.
    #[must_use]
    pub const fn num_slices(self, world: usize) -> usize {
        if matches!(self, Strategy::Tp) { 1 } else { world }
    }

    /// The slice that rank `rank` sees.
    #[must_use]
    pub const fn slice(self, rank: usize) -> usize {
        if matches!(self, Strategy::Tp) { 0 } else { rank }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A strategy at work on one rank: its communicator, its buffers, and what is under way.
#[derive(Debug)]
pub enum Driver {
    /// See [`rotated`].
    Rotated(Ring),
    /// See [`replicated`].
    Replicated(Replicas),
    /// See [`gathered`].
    Gathered(Gathering),
    /// See [`stationary`].
    Stationary(Stationary),
}

impl Driver {
    /// Takes the buffers that the built model's strategy needs.
    pub fn take(arena: &mut Arena, comm: &Comm, options: &BuildOptions, built: &Built) -> Driver {
        let overlap = options.overlap;
        match options.strategy {
            Strategy::Rtp => {
                let travel = Travel::take(arena, comm, overlap, built.need);
                Driver::Rotated(Ring::new(comm.clone(), overlap, travel))
            }
            Strategy::Ddp | Strategy::Zero1 => {
                Driver::Replicated(Replicas::new(comm.clone(), overlap, built.buckets.clone()))
            }
            Strategy::Fsdp => {
                let spares = Spares::take(arena, comm, overlap, &built.gathers);
                let uses = built.gathers.clone();
                Driver::Gathered(Gathering::new(comm.clone(), overlap, spares, uses))
            }
            Strategy::Tp => {
                Driver::Stationary(Stationary::take(arena, comm, overlap, built.partial_len))
            }
        }
    }

    /// The communicator.
    #[must_use]
    pub const fn comm(&self) -> &Comm {
        match self {
            Driver::Rotated(ring) => ring.comm(),
            Driver::Replicated(replicas) => replicas.comm(),
            Driver::Gathered(gathering) => gathering.comm(),
            Driver::Stationary(stationary) => stationary.comm(),
        }
    }

    /// A micro-batch comes next; `last` if the optimiser runs after it.
    pub fn begin(&self, last: bool) {
        if let Driver::Replicated(replicas) = self {
            replicas.begin(last);
        }
    }

    /// Waits until every gradient is where the optimiser expects it.
    ///
    /// # Errors
    /// If another rank fails.
    pub fn settle(&self, dev: &dyn Device) -> Result<()> {
        match self {
            Driver::Rotated(ring) => ring.settle(dev)?,
            Driver::Replicated(replicas) => replicas.settle(dev)?,
            Driver::Gathered(gathering) => gathering.settle(dev)?,
            Driver::Stationary(_) => {}
        }
        Ok(())
    }

    /// The weights of this rank's pieces have changed: by the optimiser, or from a file.
    ///
    /// # Errors
    /// If another rank fails.
    pub fn refresh(&self, dev: &dyn Device) -> Result<()> {
        match self {
            Driver::Replicated(replicas) => replicas.refresh(dev)?,
            Driver::Gathered(gathering) => gathering.refresh(dev)?,
            Driver::Rotated(_) | Driver::Stationary(_) => {}
        }
        Ok(())
    }

    /// Calls `visit(which rows, weights)` for all shards that this rank works on.
    ///
    /// # Errors
    /// If another rank fails.
    pub fn visit(
        &self,
        dev: &dyn Device,
        unit: &Unit,
        mut visit: impl FnMut(Span, Region),
    ) -> Result<()> {
        match self {
            Driver::Rotated(ring) => rotated::forward(ring, dev, unit, visit),
            Driver::Gathered(gathering) => gathered::forward(gathering, dev, unit, visit),
            Driver::Replicated(_) | Driver::Stationary(_) => {
                unit.homes().iter().for_each(|home| visit(home.span(), unit.held(home).0));
                Ok(())
            }
        }
    }
}

/// `y = f(x)` or `+=`, shard by shard.
///
/// # Errors
/// If another rank fails.
pub fn forward(
    cx: &Context<'_>,
    layer: &impl Sharded,
    unit: &Unit,
    x: Region,
    y: Region,
    write: Write,
) -> Result<()> {
    if let Driver::Stationary(stationary) = cx.driver {
        return stationary.forward(cx, layer, unit, x, y, write);
    }
    let write = layer.begin_forward(cx, y, write);
    let mut first = true;
    cx.driver.visit(cx.dev, unit, |span, w| {
        layer.forward(cx, &Visit { span, first, write }, w, x, y);
        first = false;
    })
}

/// `dx = f'(x) dy` or `+=`, and the gradient of every shard `+=`, shard by shard.
///
/// # Errors
/// If another rank fails.
pub fn backward(
    cx: &Context<'_>,
    layer: &impl Sharded,
    unit: &Unit,
    x: Region,
    dy: Region,
    dx: Region,
    write: Write,
) -> Result<()> {
    layer.begin_backward(cx, dy);
    let first = Cell::new(true);
    let visit = |span| Visit { span, first: first.get(), write };
    let data = |span, w| layer.backward_data(cx, &visit(span), w, x, dy, dx);
    let add = |span, w, dw| {
        layer.backward_weights(cx, &visit(span), w, x, dy, dx, dw);
        first.set(false);
    };
    match cx.driver {
        Driver::Rotated(ring) => rotated::backward(ring, cx.dev, unit, data, add),
        Driver::Replicated(replicas) => {
            replicated::backward(replicas, unit, data, add);
            Ok(())
        }
        Driver::Gathered(gathering) => gathered::backward(gathering, cx.dev, unit, data, add),
        Driver::Stationary(stationary) => stationary.backward(cx, layer, unit, (x, dy, dx), write),
    }
}

/// A sharded layer together with this rank's part of its weights: a [`Layer`].
#[derive(Debug)]
pub struct Driven<L> {
    layer: L,
    unit: Option<Unit>,
}

impl<L: Sharded> Driven<L> {
    /// Lets the run's strategy drive `layer`.
    pub const fn new(layer: L) -> Driven<L> {
        Driven { layer, unit: None }
    }

    /// This rank's part of the weights.
    ///
    /// # Panics
    /// If the layer has not been built.
    pub fn unit(&self) -> &Unit {
        self.unit.as_ref().expect("layers are built before they run")
    }
}

impl<L: Sharded> Layer for Driven<L> {
    fn width_out(&self, width_in: usize) -> usize {
        self.layer.width_out(width_in)
    }

    fn build(&mut self, b: &mut Builder<'_>, width_in: usize) -> Result<()> {
        let unit = b.unit(self.layer.spec())?;
        self.layer.build(b, width_in, unit.seen())?;
        for share in [self.layer.output(), self.layer.input_gradient()] {
            b.include_share(share);
        }
        self.unit = Some(unit);
        Ok(())
    }

    fn forward(&self, cx: &Context<'_>, x: Region, y: Region, write: Write) -> Result<()> {
        forward(cx, &self.layer, self.unit(), x, y, write)
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        x: Region,
        dy: Region,
        dx: Region,
        write: Write,
    ) -> Result<()> {
        backward(cx, &self.layer, self.unit(), x, dy, dx, write)
    }
}
