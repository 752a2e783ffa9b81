//! From a model's structure to its memory: units, replicated parameters, activations, scratch.
//!
//! A model is built twice by the same code: once on an arena that only counts, which also learns
//! how many replicated parameters there are and how much travels, then on the live one.

use rotifer_device::{Arena, Dtype, Purpose, Region};
use rotifer_ring::schedule::Cut;
use rotifer_ring::{Comm, HopMode, Shards, TravelNeed};

use crate::error::{Error, Result};
use crate::params::{Init, Layout, Param, Piece};

/// What a model is built for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BuildOptions {
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
    /// Whether hops run beside products.
    pub overlap: bool,
}

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
    /// Bound of a shard's rows from the layer's side, for what it allocates per shard row.
    pub shard_rows_max: usize,
    /// Whether the layer's backward reads the weights.
    pub backward_reads_weights: bool,
}

/// This rank's part of a unit.
#[derive(Clone, Debug)]
pub struct Unit {
    number: u32,
    cut: Cut,
    width: usize,
    backward_reads_weights: bool,
    /// Home of the weights and of the gradients, per group.
    homes: Vec<(Region, Region)>,
}

impl Unit {
    /// Its groups of shards, which rotate one after the other.
    pub fn groups(&self) -> impl Iterator<Item = Shards> + '_ {
        self.homes.iter().enumerate().map(|(group, &(weights, gradients))| Shards {
            unit: self.number,
            cut: self.cut,
            group,
            width: self.width,
            weights,
            gradients,
            backward_reads_weights: self.backward_reads_weights,
        })
    }

    /// Its number, for messages.
    #[must_use]
    pub const fn number(&self) -> u32 {
        self.number
    }

    /// How it is cut.
    #[must_use]
    pub const fn cut(&self) -> Cut {
        self.cut
    }
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
    units: Vec<(UnitSpec, Unit)>,
    params: Vec<Param>,
    layers: u64,
    counting: bool,
    replicated: Replicated,
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
    /// What the travel buffers must hold.
    pub need: TravelNeed,
    /// Elements of replicated parameters.
    pub replicated_len: usize,
}

impl<'a> Builder<'a> {
    /// A builder over an arena. `replicated_len` is what a counting pass found, or `None` in it.
    pub fn new(
        arena: &'a mut Arena,
        comm: &Comm,
        options: BuildOptions,
        replicated_len: Option<usize>,
    ) -> Builder<'a> {
        let replicated = match replicated_len {
            Some(len) => Replicated::take(arena, &options, len),
            // Handles of the right kind for the counting pass, which has no bytes anyway.
            None => Replicated::take(&mut Arena::counting(), &options, usize::MAX / 64),
        };
        Builder {
            arena,
            options,
            rank: comm.rank(),
            world: comm.world(),
            hop_mode: comm.hop_mode(),
            need: TravelNeed::default(),
            units: Vec::new(),
            params: Vec::new(),
            layers: 0,
            counting: replicated_len.is_none(),
            replicated,
        }
    }

    /// What the model is built for.
    #[must_use]
    pub const fn options(&self) -> &BuildOptions {
        &self.options
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
        if let Some((known, unit)) = self.units.iter().find(|(known, _)| known.name == spec.name) {
            if known.rows != spec.rows || known.tensors != spec.tensors {
                let [first, second] =
                    [known, &spec].map(|s| format!("{} x {:?}", s.rows, s.tensors));
                return Err(Error::UnitMismatch { unit: spec.name, first, second });
            }
            // How a shared unit is cut was decided by its first user; what its backward reads is
            // each user's own.
            let backward_reads_weights = spec.backward_reads_weights;
            return Ok(Unit { backward_reads_weights, ..unit.clone() });
        }
        let width: usize = spec.tensors.iter().map(|t| t.width).sum();
        let row_bytes = (width * Dtype::F32.bytes()).max(1);
        let travel_rows = match self.world {
            1 => spec.rows,
            _ => self.options.travel_bytes_max / row_bytes,
        };
        let cut = Cut::new(spec.rows, self.world, spec.shard_rows_max.min(travel_rows).max(1));
        let len = cut.shard_rows_max() * width;
        let trained = usize::from(self.options.train);
        self.need.include(len, len * trained);
        let mut homes = Vec::new();
        let mut states = Vec::new();
        for _ in 0..cut.groups() {
            let mut take = |purpose, len| self.arena.take(purpose, Dtype::F32, len);
            homes.push((take(Purpose::Weights, len), take(Purpose::Gradients, len * trained)));
            let count = self.options.states * trained;
            states.push((0..count).map(|_| take(Purpose::Optimizer, len)).collect::<Vec<_>>());
        }
        let number = u32::try_from(self.units.len()).expect("fewer than 2^32 units");
        let backward_reads_weights = spec.backward_reads_weights;
        let unit = Unit { number, cut, width, backward_reads_weights, homes };
        self.add_params(&spec, &unit, &states)?;
        self.units.push((spec, unit.clone()));
        Ok(unit)
    }

    /// Adds a parameter, whose name must be new: it is a key in files.
    fn add(&mut self, param: Param) -> Result<()> {
        if self.params.iter().any(|known| known.name == param.name) {
            return Err(Error::SameName { tensor: param.name });
        }
        self.params.push(param);
        Ok(())
    }

    fn add_params(&mut self, spec: &UnitSpec, unit: &Unit, states: &[Vec<Region>]) -> Result<()> {
        let mut before = 0;
        for tensor in &spec.tensors {
            let pieces =
                unit.homes.iter().zip(states).enumerate().map(|(group, (home, states))| {
                    let rows = unit.cut.shard(group, self.rank);
                    let within = rows.len() * before..rows.len() * (before + tensor.width);
                    let part = |r: Region| if r.is_empty() { r } else { r.slice(within.clone()) };
                    let (weights, gradients) = (part(home.0), part(home.1));
                    Piece {
                        rows,
                        weights,
                        gradients,
                        states: states.iter().copied().map(part).collect(),
                    }
                });
            let pieces = pieces.collect();
            self.add(Param {
                name: tensor.name.clone(),
                rows: spec.rows,
                width: tensor.width,
                layout: tensor.layout,
                init: tensor.init,
                decay: tensor.decay,
                replicated: false,
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
        if self.counting {
            // Only now is their number known; the live pass takes as much at its start.
            Replicated::take(self.arena, &self.options, self.replicated.used);
        }
        Built {
            params: self.params,
            unit_names: self.units.into_iter().map(|(spec, _)| spec.name).collect(),
            replicated_gradients: self.replicated.gradients,
            need: self.need,
            replicated_len: self.replicated.used,
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
