//! From a model's structure to its memory: units, replicated parameters, activations, scratch.
//!
//! A model is built twice by the same code: once on an arena that only counts, which also learns
//! how many replicated parameters there are and how much travels, then on the live one.

mod unit;

use rotifer_device::{Arena, Dtype, Purpose, Region};
use rotifer_ring::{Bucket, Comm, Gather, HopMode, Parts, TravelNeed};

use crate::error::{Error, Result};
use crate::params::{Init, Layout, Param, Piece};
use crate::sharded::Share;
use crate::strategy::{Strategy, replicated::BUCKET_BYTES};
pub use unit::{Home, Tensor, Unit, UnitSpec};
use unit::{Spread, Trained};

/// What a model is built for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BuildOptions {
    /// What the ranks hold and exchange.
    pub strategy: Strategy,
    /// s: tokens per row.
    pub seq: usize,
    /// Rows of a rank's largest micro-batch slice.
    pub rows_max: usize,
    /// Whether there will be backward passes: gradients, optimiser state, kept activations.
    pub train: bool,
    /// Regions of optimiser state per weight: 2 for AdamW, 1 for SGD with momentum.
    pub states: usize,
    /// Rows for which the model makes logits when it samples; 0 if it never does.
    pub logits_rows: usize,
    /// Bound of one travelling shard; units whose shards are larger rotate in groups.
    pub travel_bytes_max: usize,
    /// Whether what moves does so beside products.
    pub overlap: bool,
    /// Fully sharded data parallelism: whether a unit is given up between forward and backward.
    pub reshard_after_forward: bool,
}

/// Collects what a model needs, and hands it out.
#[derive(Debug)]
pub struct Builder<'a> {
    arena: &'a mut Arena,
    options: BuildOptions,
    rank: usize,
    world: usize,
    hop_mode: HopMode,
    need: TravelNeed,
    gathers: Vec<Gather>,
    partial_len: usize,
    units: Vec<(UnitSpec, Unit)>,
    params: Vec<Param>,
    layers: u64,
    counting: bool,
    replicated: Replicated,
    buckets: Buckets,
    /// Number of groups that stay whole from forward to backward.
    kept: usize,
}

/// What a counting pass finds out that the live pass needs at its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Elements of replicated parameters.
    pub replicated_len: usize,
    /// Elements of the gradients that are summed in buckets.
    pub bucket_len: usize,
}

/// Under data parallelism: the gradients of all units in one region, of which a bucket is a run.
#[derive(Debug)]
struct Buckets {
    gradients: Region,
    used: usize,
    list: Vec<Bucket>,
    /// Where the last of them begins.
    start: usize,
}

/// The parameters that every rank has whole (norms, sum-type biases): one region for all of them,
/// so that one all-reduce a step sums their gradients.
#[derive(Debug)]
struct Replicated {
    weights: Region,
    gradients: Region,
    states: Vec<Region>,
    used: usize,
}

/// What a build yields beside the model's own handles.
#[derive(Debug)]
pub struct Built {
    /// Every parameter, in the order of building.
    pub params: Vec<Param>,
    /// Names of the units, by number.
    pub unit_names: Vec<String>,
    /// Gradients of all replicated parameters.
    pub replicated_gradients: Region,
    /// What the travel buffers must hold, if shards rotate.
    pub need: TravelNeed,
    /// What is summed together, under data parallelism.
    pub buckets: Vec<Bucket>,
    /// Every use of a group, under fully sharded data parallelism.
    pub gathers: Vec<Gather>,
    /// Elements of the longest share of a sum, under tensor parallelism.
    pub partial_len: usize,
    /// What the live pass needs to know.
    pub counted: Counted,
}

impl<'a> Builder<'a> {
    /// A builder over an arena. `counted` is what a counting pass found, or `None` in it.
    pub fn new(
        arena: &'a mut Arena,
        comm: &Comm,
        options: BuildOptions,
        counted: Option<Counted>,
    ) -> Builder<'a> {
        // Handles of the right kind for the counting pass, which has no bytes anyway.
        let most = usize::MAX / 64;
        let placeholder = Counted { replicated_len: most, bucket_len: most };
        let mut nowhere = Arena::counting();
        let counting = counted.is_none();
        let (from, counted) = match counted {
            Some(counted) => (&mut *arena, counted),
            None => (&mut nowhere, placeholder),
        };
        let replicated = Replicated::take(from, &options, counted.replicated_len);
        let buckets = Buckets::take(from, &options, counted.bucket_len);
        Builder {
            arena,
            options,
            rank: comm.rank(),
            world: comm.world(),
            hop_mode: comm.hop_mode(),
            need: TravelNeed::default(),
            gathers: Vec::new(),
            partial_len: 0,
            units: Vec::new(),
            params: Vec::new(),
            layers: 0,
            counting,
            replicated,
            buckets,
            kept: 0,
        }
    }

    /// What the model is built for.
    #[must_use]
    pub const fn options(&self) -> &BuildOptions {
        &self.options
    }

    /// What the ranks hold and exchange.
    #[must_use]
    pub const fn strategy(&self) -> Strategy {
        self.options.strategy
    }

    /// Number of ranks.
    #[must_use]
    pub const fn world(&self) -> usize {
        self.world
    }

    /// t of the largest micro-batch slice.
    #[must_use]
    pub const fn tokens_max(&self) -> usize {
        self.options.rows_max * self.options.seq
    }

    /// A number for a layer that needs its own random numbers.
    pub const fn next_layer(&mut self) -> u64 {
        self.layers += 1;
        self.layers
    }

    /// Runs `f` in a scratch scope of its own.
    pub fn scope<R>(&mut self, f: impl FnOnce(&mut Self) -> R) -> R {
        let scope = self.arena.open_scope();
        let result = f(self);
        self.arena.close_scope(scope);
        result
    }

    /// What forward keeps for backward. A model that never runs backward needs it no longer than
    /// the layer's call.
    pub fn kept(&mut self, dtype: Dtype, len: usize) -> Region {
        if self.options.train {
            self.arena.take(Purpose::Activations, dtype, len)
        } else {
            self.arena.scratch(dtype, len)
        }
    }

    /// A region for the model's whole life, such as the step's inputs.
    pub fn input(&mut self, dtype: Dtype, len: usize) -> Region {
        self.arena.take(Purpose::Activations, dtype, len)
    }

    /// Scratch until the end of the layer's scope.
    pub fn scratch(&mut self, dtype: Dtype, len: usize) -> Region {
        self.arena.scratch(dtype, len)
    }

    /// Makes room on the ring for a tour of every rank's tokens and one row of `width` elements for
    /// each. Returns the number of blocks that the tokens tour in, one after the other: as many as
    /// the bound of what travels asks for, but one if nothing spare is needed.
    pub fn tour_blocks(&mut self, width: usize) -> usize {
        let tokens = self.tokens_max();
        if self.world == 1 || self.hop_mode == HopMode::HandOver || !self.options.overlap {
            self.need.include(tokens, tokens * width);
            return 1;
        }
        let block = (self.options.travel_bytes_max / (4 * width.max(1))).clamp(1, tokens.max(1));
        let blocks = tokens.div_ceil(block).max(1);
        self.need.include(tokens.div_ceil(blocks), tokens.div_ceil(blocks) * width);
        blocks
    }

    /// This rank's part of a unit. Layers that name the same unit share it: one shard, one
    /// gradient, one optimiser state (a tied embedding).
    ///
    /// # Errors
    /// If a unit of that name exists with other tensors or another number of rows.
    pub fn unit(&mut self, spec: UnitSpec) -> Result<Unit> {
        let known = self.units.iter().find(|(known, _)| known.name == spec.name);
        let mut unit = match known {
            Some((known, _)) if known.rows != spec.rows || known.tensors != spec.tensors => {
                let [first, second] =
                    [known, &spec].map(|s| format!("{} x {:?}", s.rows, s.tensors));
                return Err(Error::UnitMismatch { unit: spec.name, first, second });
            }
            Some((_, unit)) => unit.clone(),
            None => self.new_unit(&spec)?,
        };
        // How a shared unit is cut was decided by its first user; what its backward reads is each
        // user's own.
        unit.backward_reads_weights = spec.backward_reads_weights;
        unit.first_use = self.gathers.len();
        for (group, home) in unit.homes.iter().enumerate() {
            match self.options.strategy {
                Strategy::Fsdp => self.gathers.push(Gather {
                    unit: unit.number,
                    parts: unit.parts(group),
                    weights: home.weights,
                    gradients: home.gradients,
                    kept: home.kept,
                    backward_reads_weights: unit.backward_reads_weights,
                }),
                Strategy::Ddp | Strategy::Zero1 => {
                    self.buckets.list[home.bucket].contributions += 1;
                }
                Strategy::Rtp | Strategy::Tp => {}
            }
        }
        Ok(unit)
    }

    fn new_unit(&mut self, spec: &UnitSpec) -> Result<Unit> {
        let BuildOptions { strategy, train, .. } = self.options;
        let travel_rows = match self.world {
            1 => spec.rows,
            _ => self.options.travel_bytes_max / spec.row_bytes().max(1),
        };
        let spread = Spread::new(spec, strategy, self.world, travel_rows);
        let mut unit = Unit {
            number: u32::try_from(self.units.len()).expect("fewer than 2^32 units"),
            cut: spread.cut,
            widths: spec.tensors.iter().map(|t| t.width).collect(),
            backward_reads_weights: spec.backward_reads_weights,
            seen: spread.seen,
            homes: Vec::new(),
            first_use: 0,
        };
        let width = unit.width();
        let (len, trained) = (spread.home_rows * width, usize::from(train));
        self.need.include(len, len * trained);
        let mut states = Vec::new();
        let mut at = 0;
        for group in 0..spread.cut.groups() {
            let weights = self.arena.take(Purpose::Weights, Dtype::F32, len);
            let (gradients, bucket) = if strategy.holds_all() {
                let shared = (strategy == Strategy::Zero1).then(|| (unit.parts(group), weights));
                self.buckets.add(unit.number, len * trained, shared)
            } else {
                (self.arena.take(Purpose::Gradients, Dtype::F32, len * trained), 0)
            };
            let span = spread.span(spec, strategy, group, self.rank, at);
            at += span.local.len();
            let kept = self.kept_whole(spread.cut.group_rows_max() * width);
            unit.homes.push(Home { weights, gradients, span, bucket, kept });
            let count = self.options.states * trained;
            let mut state =
                || self.arena.take(Purpose::Optimizer, Dtype::F32, spread.state_rows * width);
            states.push((0..count).map(|_| state()).collect::<Vec<_>>());
        }
        self.add_params(spec, &spread, &unit, &states)?;
        self.units.push((spec.clone(), unit.clone()));
        Ok(unit)
    }

    /// Under fully sharded data parallelism without resharding: where a whole group stays.
    fn kept_whole(&mut self, len: usize) -> Option<(usize, Region)> {
        let BuildOptions { strategy, train, reshard_after_forward, .. } = self.options;
        if strategy != Strategy::Fsdp || reshard_after_forward || !train || self.world == 1 {
            return None;
        }
        self.kept += 1;
        Some((self.kept - 1, self.arena.take(Purpose::Travel, Dtype::F32, len)))
    }

    /// Makes room for the shares of a sum over the ranks, under tensor parallelism.
    pub fn include_share(&mut self, share: Share) {
        if let Share::Sum { width } = share {
            self.partial_len = self.partial_len.max(self.tokens_max() * width);
        }
    }

    /// Adds a parameter, whose name must be new: it is a key in files.
    fn add(&mut self, param: Param) -> Result<()> {
        if self.params.iter().any(|known| known.name == param.name) {
            return Err(Error::SameName { tensor: param.name });
        }
        self.params.push(param);
        Ok(())
    }

    fn add_params(
        &mut self,
        spec: &UnitSpec,
        spread: &Spread,
        unit: &Unit,
        states: &[Vec<Region>],
    ) -> Result<()> {
        let strategy = self.options.strategy;
        let mut before = 0;
        for tensor in &spec.tensors {
            let mut pieces = Vec::new();
            for (group, (home, states)) in unit.homes.iter().zip(states).enumerate() {
                for held in spread.trained(spec, strategy, group, self.rank) {
                    pieces.push(piece(home, states, &held, before, tensor.width));
                }
            }
            self.add(Param {
                name: tensor.name.clone(),
                rows: spec.rows,
                width: tensor.width,
                layout: tensor.layout,
                init: tensor.init,
                decay: tensor.decay,
                replicated: strategy == Strategy::Ddp,
                pieces,
            })?;
            before += tensor.width;
        }
        Ok(())
    }

    /// A small parameter of `len` elements that every rank has whole; never decayed. Returns its
    /// weights and gradients.
    ///
    /// # Errors
    /// If the model has a parameter of that name already.
    pub fn replicated(&mut self, name: String, len: usize, init: Init) -> Result<(Region, Region)> {
        let range = self.replicated.used..self.replicated.used + len;
        self.replicated.used = range.end;
        let part = |r: Region| if r.is_empty() { r } else { r.slice(range.clone()) };
        let (weights, gradients) = (part(self.replicated.weights), part(self.replicated.gradients));
        let states = self.replicated.states.iter().copied().map(part).collect();
        self.add(Param {
            name,
            rows: len,
            width: 1,
            layout: Layout::Vector,
            init,
            decay: false,
            replicated: true,
            pieces: vec![Piece { rows: 0..len, weights, gradients, states }],
        })?;
        Ok((weights, gradients))
    }

    /// Ends the build.
    #[must_use]
    pub fn finish(self) -> Built {
        let counted =
            Counted { replicated_len: self.replicated.used, bucket_len: self.buckets.used };
        if self.counting {
            // Only now are their numbers known; the live pass takes as much at its start.
            Replicated::take(self.arena, &self.options, counted.replicated_len);
            Buckets::take(self.arena, &self.options, counted.bucket_len);
        }
        Built {
            params: self.params,
            unit_names: self.units.into_iter().map(|(spec, _)| spec.name).collect(),
            replicated_gradients: self.replicated.gradients,
            need: self.need,
            buckets: self.buckets.list,
            gathers: self.gathers,
            partial_len: self.partial_len,
            counted,
        }
    }
}

impl Replicated {
    fn take(arena: &mut Arena, options: &BuildOptions, len: usize) -> Replicated {
        let trained = usize::from(options.train);
        let mut take = |purpose, len| arena.take(purpose, Dtype::F32, len);
        Replicated {
            weights: take(Purpose::Weights, len),
            gradients: take(Purpose::Gradients, len * trained),
            states: (0..options.states * trained).map(|_| take(Purpose::Optimizer, len)).collect(),
            used: 0,
        }
    }
}

impl Buckets {
    /// Elements that every group's gradients begin at a multiple of: a cache line.
    const ALIGN: usize = 16;

    fn take(arena: &mut Arena, options: &BuildOptions, len: usize) -> Buckets {
        let len = if options.strategy.holds_all() && options.train { len } else { 0 };
        let gradients = arena.take(Purpose::Gradients, Dtype::F32, len);
        Buckets { gradients, used: 0, list: Vec::new(), start: 0 }
    }

    /// Gradients of `len` elements for the next group, and their bucket: the last one until it is
    /// full, or one of their own if ranks share the optimiser's work.
    fn add(&mut self, unit: u32, len: usize, shared: Option<(Parts, Region)>) -> (Region, usize) {
        let start = self.used;
        self.used = (start + len).next_multiple_of(Buckets::ALIGN);
        let gradients = self.gradients.slice(start..start + len);
        match (self.list.last_mut(), shared) {
            (Some(last), None) if last.gradients.bytes() < BUCKET_BYTES => {
                last.gradients = self.gradients.slice(self.start..start + len);
            }
            (_, shared) => {
                let of =
                    |region: Region, parts: &Parts| region.first(parts.len().min(region.len()));
                let shared = shared.map(|(parts, weights)| {
                    let weights = of(weights, &parts);
                    (parts, weights)
                });
                let gradients =
                    shared.as_ref().map_or(gradients, |(parts, _)| of(gradients, parts));
                self.start = start;
                self.list.push(Bucket { unit, gradients, shared, contributions: 0 });
            }
        }
        (gradients, self.list.len() - 1)
    }
}

/// This rank's piece of one tensor of a group: `width` columns behind `before` columns of others.
fn piece(home: &Home, states: &[Region], held: &Trained, before: usize, width: usize) -> Piece {
    let part = |region: Region, rows: usize, at: usize| {
        let start = rows * before + at * width;
        if region.is_empty() {
            region
        } else {
            region.slice(start..start + held.rows.len() * width)
        }
    };
    let state = |region: &Region| part(*region, held.state_rows, held.state_at);
    Piece {
        rows: held.rows.clone(),
        weights: part(home.weights, held.home_rows, held.at),
        gradients: part(home.gradients, held.home_rows, held.at),
        states: states.iter().map(state).collect(),
    }
}
