//! The weights that travel together, and what of them one rank holds.

use std::ops::Range;
use std::sync::Arc;

use rotifer_device::{Dtype, Region};
use rotifer_ring::schedule::{Cut, part};
use rotifer_ring::{Parts, Shards};

use crate::params::{Init, Layout};
use crate::sharded::{Seen, Span};
use crate::strategy::Strategy;

/// One weight tensor of a unit: `rows x width`, cut along the rows with all others of its unit.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Full name, as in the checkpoint.
    pub name: String,
    /// Elements per row.
    pub width: usize,
    /// How it lies in files.
    pub layout: Layout,
    /// Initial value.
    pub init: Init,
    /// Whether weight decay applies.
    pub decay: bool,
}

/// The weights that travel together.
#[derive(Clone, Debug, PartialEq)]
pub struct UnitSpec {
    /// Name for messages; also the identity by which layers share one unit.
    pub name: String,
    /// Rows that the unit is cut along.
    pub rows: usize,
    /// Its tensors; a shard holds the same rows of each, one tensor behind the other.
    pub tensors: Vec<Tensor>,
    /// Rows of the blocks that tensor parallelism cuts each on its own, so that a rank gets
    /// queries, keys and values of the same heads; empty for a single block. Others cut anywhere.
    pub blocks: Vec<usize>,
    /// Bound of the rows that a visit brings, from the layer's side, for what it allocates per row.
    pub visit_rows_max: usize,
    /// Whether the layer's backward reads the weights.
    pub backward_reads_weights: bool,
}

/// One group of a unit, on this rank.
#[derive(Clone, Debug)]
pub struct Home {
    pub(super) weights: Region,
    pub(super) gradients: Region,
    pub(super) span: Span,
    pub(super) bucket: usize,
    /// Where the whole group stays from forward to backward, and its number.
    pub(super) kept: Option<(usize, Region)>,
}

impl Home {
    /// The rows that this rank computes with what is here.
    #[must_use]
    pub fn span(&self) -> Span {
        self.span.clone()
    }

    /// Under data parallelism: the bucket of the gradients.
    #[must_use]
    pub const fn bucket(&self) -> usize {
        self.bucket
    }
}

/// This rank's part of a unit.
#[derive(Clone, Debug)]
pub struct Unit {
    pub(super) number: u32,
    pub(super) cut: Cut,
    pub(super) widths: Arc<[usize]>,
    pub(super) backward_reads_weights: bool,
    pub(super) seen: Seen,
    /// Per group.
    pub(super) homes: Vec<Home>,
    /// Of this layer's uses of the groups, the number of the first among all of the model.
    pub(super) first_use: usize,
}

impl Unit {
    /// Its number, for messages.
    #[must_use]
    pub const fn number(&self) -> u32 {
        self.number
    }

    /// What of it this rank works on in a pass.
    #[must_use]
    pub const fn seen(&self) -> Seen {
        self.seen
    }

    /// Its groups.
    #[must_use]
    pub fn homes(&self) -> &[Home] {
        &self.homes
    }

    /// Weights and gradients of the rows that this rank computes, where they are here.
    #[must_use]
    pub fn held(&self, home: &Home) -> (Region, Region) {
        let len = home.span.local.len() * self.width();
        (home.weights.first(len), home.gradients.first(len.min(home.gradients.len())))
    }

    /// Its groups as the ring takes them.
    pub fn shards(&self) -> impl Iterator<Item = Shards> + '_ {
        let width = self.width();
        self.homes.iter().enumerate().map(move |(group, home)| Shards {
            unit: self.number,
            cut: self.cut,
            group,
            width,
            weights: home.weights,
            gradients: home.gradients,
            backward_reads_weights: self.backward_reads_weights,
        })
    }

    /// The number of this layer's use of the first group, among all uses of the model.
    #[must_use]
    pub const fn first_use(&self) -> usize {
        self.first_use
    }

    /// Whether this layer's backward reads the weights.
    #[must_use]
    pub const fn backward_reads_weights(&self) -> bool {
        self.backward_reads_weights
    }

    /// How the ranks' shards of a group make the whole.
    #[must_use]
    pub fn parts(&self, group: usize) -> Parts {
        Parts::new(self.cut, group, self.widths.clone())
    }

    /// Elements of one row of all tensors.
    #[must_use]
    pub fn width(&self) -> usize {
        self.widths.iter().sum()
    }
}

/// How a unit is spread over the ranks: what a strategy decides before there is memory.
pub(super) struct Spread {
    pub cut: Cut,
    pub seen: Seen,
    /// Rows that there is room for in each home; the same on all ranks.
    pub home_rows: usize,
    /// Rows that there is room for in each home's optimiser state.
    pub state_rows: usize,
}

/// Rows of a tensor that this rank trains: their numbers in the whole, where they are in a home of
/// how many rows, and the same for the optimiser state.
pub(super) struct Trained {
    pub rows: Range<usize>,
    pub at: usize,
    pub home_rows: usize,
    pub state_at: usize,
    pub state_rows: usize,
}

impl Spread {
    /// Spreads `spec` over `world` ranks. `travel_rows` bounds a shard that travels.
    pub fn new(spec: &UnitSpec, strategy: Strategy, world: usize, travel_rows: usize) -> Spread {
        let (rows, most) = (spec.rows, spec.visit_rows_max);
        let cut = match strategy {
            Strategy::Rtp => Cut::new(rows, world, most.min(travel_rows).max(1)),
            Strategy::Ddp | Strategy::Zero1 | Strategy::Fsdp => Cut::in_groups(rows, world, most),
            Strategy::Tp => Cut::new(rows, world, most),
        };
        let all = |span_rows_max| Seen { rows, span_rows_max };
        let (whole, shard) = (cut.group_rows_max(), cut.shard_rows_max());
        let (seen, home_rows, state_rows) = match strategy {
            Strategy::Rtp => (all(shard), shard, shard),
            Strategy::Ddp => (all(whole), whole, whole),
            Strategy::Zero1 => (all(whole), whole, shard),
            Strategy::Fsdp => (all(whole), shard, shard),
            Strategy::Tp => {
                let blocks = spec.blocks.iter().map(|rows| rows.div_ceil(world)).sum();
                let held = if spec.blocks.is_empty() { shard } else { blocks };
                (Seen { rows: cut.groups() * held, span_rows_max: held }, held, held)
            }
        };
        Spread { cut, seen, home_rows, state_rows }
    }

    /// The rows of a group that `rank` computes from its home, the first of which is the `at`-th
    /// that it works on.
    pub fn span(
        &self,
        spec: &UnitSpec,
        strategy: Strategy,
        group: usize,
        rank: usize,
        at: usize,
    ) -> Span {
        let shard = self.cut.shard(group, rank);
        match strategy {
            Strategy::Rtp => Span::of(shard),
            Strategy::Ddp | Strategy::Zero1 | Strategy::Fsdp => Span::of(self.cut.group(group)),
            Strategy::Tp => {
                let held = block_parts(spec, &self.cut, group, rank);
                let rows: usize = held.iter().map(Range::len).sum();
                Span { first_row: held[0].start, local: at..at + rows }
            }
        }
    }

    /// The rows of a group that `rank` trains.
    pub fn trained(
        &self,
        spec: &UnitSpec,
        strategy: Strategy,
        group: usize,
        rank: usize,
    ) -> Vec<Trained> {
        let (shard, whole) = (self.cut.shard(group, rank), self.cut.group(group));
        let packed = |parts: &[Range<usize>]| {
            let home_rows = parts.iter().map(Range::len).sum();
            let mut at = 0;
            let mut place = |rows: &Range<usize>| {
                at += rows.len();
                let at = at - rows.len();
                let rows = rows.clone();
                Trained { rows, at, home_rows, state_at: at, state_rows: home_rows }
            };
            parts.iter().map(&mut place).collect()
        };
        match strategy {
            Strategy::Rtp | Strategy::Fsdp => packed(&[shard]),
            Strategy::Ddp => packed(&[whole]),
            Strategy::Zero1 => {
                let (at, state_rows) = (shard.start - whole.start, shard.len());
                vec![Trained { rows: shard, at, home_rows: whole.len(), state_at: 0, state_rows }]
            }
            Strategy::Tp => packed(&block_parts(spec, &self.cut, group, rank)),
        }
    }
}

/// The rows of a group that tensor parallelism gives to `rank`.
fn block_parts(spec: &UnitSpec, cut: &Cut, group: usize, rank: usize) -> Vec<Range<usize>> {
    if spec.blocks.is_empty() {
        return vec![cut.shard(group, rank)];
    }
    let mut start = 0;
    let block = |rows: &usize| {
        start += rows;
        let part = part(*rows, cut.world(), rank);
        start - rows + part.start..start - rows + part.end
    };
    spec.blocks.iter().map(block).collect()
}

impl UnitSpec {
    /// Bytes of one row of all tensors.
    pub(super) fn row_bytes(&self) -> usize {
        self.tensors.iter().map(|t| t.width).sum::<usize>() * Dtype::F32.bytes()
    }
}
