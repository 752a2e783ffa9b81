//! Strategies side by side: the same model, data and global batch under each of them.
//!
//! [`run`] measures time and memory; [`capacity`] finds the largest model that each can train
//! within a limit of bytes per rank. Measurements alternate (A B C, A B C, ..), so that a machine
//! that slows down over the run slows down all of them alike.

mod capacity;
mod error;
mod measure;
mod report;
mod variant;

use std::num::NonZeroUsize;

use rotifer_device::MemoryPlan;
use rotifer_ring::{Comm, launch};

use crate::config::Config;
use crate::data::Splits;
use crate::error::{Error as AnyError, Result};
use crate::models::gpt2;
use crate::train;
pub use capacity::{
    CapacityOptions, CapacityReport, CapacityRow, Found, LAYERS_MAX, Search, Verified, capacity,
    parse_bytes,
};
pub use error::Error;
use measure::{Gemm, Run};
pub use report::{
    Bytes, FORMAT, Link, Measured, Moved, Outcome, Report, Row, Split, Spread, WorldReport,
};
pub use variant::Variant;

/// What to measure, and how often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Numbers of ranks, in any order.
    pub ranks: Vec<usize>,
    /// The strategies.
    pub variants: Vec<Variant>,
    /// How often each of them is measured on each number of ranks.
    pub rounds: usize,
    /// Steps of each measurement that do not count: they touch memory for the first time.
    pub warmup: usize,
    /// Steps of each measurement that count.
    pub steps: usize,
    /// Cores that the ranks share, unless the config says how many threads a rank has.
    pub cores: usize,
}

impl Options {
    fn check(&self) -> Result<(), Error> {
        require_cases(&self.ranks, &self.variants)?;
        for (what, value) in [("rounds", self.rounds), ("steps", self.steps)] {
            if value == 0 {
                return Err(Error::Zero { what });
            }
        }
        Ok(())
    }
}

/// Checks that there is something to compare.
fn require_cases(ranks: &[usize], variants: &[Variant]) -> Result<(), Error> {
    if ranks.is_empty() || ranks.contains(&0) {
        return Err(Error::Zero { what: "ranks" });
    }
    if variants.is_empty() {
        return Err(Error::Zero { what: "strategies" });
    }
    Ok(())
}

/// Which measurement of a benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measurement {
    /// Its number, from 0.
    pub number: usize,
    /// How many there are.
    pub of: usize,
    /// Its round, from 0.
    pub round: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// The strategy.
    pub variant: Variant,
}

/// What a benchmark tells while it goes on.
pub trait Observer {
    /// A measurement begins.
    fn begins(&self, measurement: &Measurement);
    /// It has ended: with the median of its tokens per second, or because it is not possible. One
    /// that is not possible is not tried again.
    fn ends(&self, measurement: &Measurement, outcome: Result<f64, &AnyError>);
}

/// Threads of each of `ranks` ranks: what the config says, or the cores divided among the ranks.
fn threads_per_rank(config: &Config, cores: usize, ranks: usize) -> usize {
    config.ranks.threads.map_or((cores / ranks).max(1), NonZeroUsize::get)
}

/// Bytes of the rank that has most, without allocating any.
fn plan_of(config: &Config, splits: &Splits) -> Result<MemoryPlan> {
    config.validate()?;
    let (spec, options) = (config.gpt2(), config.train_options(splits));
    let plans = launch::threads(&config.launch_options(), |comm| {
        train::plan(&mut gpt2(&spec), &comm, &options)
    })?;
    Ok(plans.into_iter().max_by_key(MemoryPlan::total).expect("a rank"))
}

/// One strategy on one number of ranks, and what was measured so far.
struct Case {
    variant: Variant,
    config: Config,
    runs: Result<Vec<Run>>,
}

/// All strategies on one number of ranks.
struct World {
    ranks: usize,
    threads: usize,
    /// What the ranks compute on, and how fast; measured once a strategy has run.
    gemm: Option<Gemm>,
    cases: Vec<Case>,
}

impl World {
    /// Nothing is measured yet, but what is not possible is known.
    fn new(config: &Config, ranks: usize, options: &Options, splits: &Splits) -> World {
        let case = |variant: &Variant| {
            let config = variant.config(config, ranks);
            let train = &splits.train;
            let plan = plan_of(&config, splits)
                .and_then(|_| Ok(train.require_windows("training", config.seq(), ranks)?));
            Case { variant: *variant, config, runs: plan.map(|()| Vec::new()) }
        };
        World {
            ranks,
            threads: threads_per_rank(config, options.cores, ranks),
            gemm: None,
            cases: options.variants.iter().map(case).collect(),
        }
    }
}

/// Measures every strategy of `options` on every number of ranks.
///
/// Each measurement starts the ranks anew, with the same random weights and the same rows. A
/// strategy that is not possible (a batch with fewer rows than ranks, heads that do not divide, too
/// little memory) is a row of the report that says why, and the others go on.
///
/// # Errors
/// If the options ask for nothing, the data cannot be read, the model is not possible on one rank,
/// or not one strategy could be measured.
pub fn run(config: &Config, options: &Options, observer: &dyn Observer) -> Result<Report> {
    options.check()?;
    let alone = Variant::Rtp.config(config, 1);
    let splits = alone.open_data()?;
    let train_options = alone.train_options(&splits);
    let one_rank = train::plan(&mut gpt2(&alone.gpt2()), &Comm::alone(), &train_options)?;
    let parameters = train::num_parameters(&mut gpt2(&alone.gpt2()), &train_options)?;
    let options = Options {
        ranks: ascending(&options.ranks),
        variants: distinct(&options.variants),
        ..options.clone()
    };
    let world = |ranks: &usize| World::new(config, *ranks, &options, &splits);
    let mut worlds: Vec<World> = options.ranks.iter().map(world).collect();
    let cases = require_any(&worlds)?;
    let of = cases * options.rounds;
    let mut bench = Bench { options, splits, observer, number: 0, of };
    for round in 0..bench.options.rounds {
        for world in &mut worlds {
            bench.round(round, world)?;
        }
    }
    require_any(&worlds)?;
    Ok(Report::new(config, &bench.options, &worlds, &one_rank, parameters))
}

/// A benchmark under way.
struct Bench<'a> {
    options: Options,
    splits: Splits,
    observer: &'a dyn Observer,
    /// Number of the next measurement.
    number: usize,
    /// How many there are, if none fails.
    of: usize,
}

impl Bench<'_> {
    /// Measures each strategy on one number of ranks once.
    fn round(&mut self, round: usize, world: &mut World) -> Result<()> {
        let Bench { options: Options { warmup, steps, .. }, of, .. } = *self;
        for case in &mut world.cases {
            let Ok(runs) = &mut case.runs else { continue };
            let (ranks, variant) = (world.ranks, case.variant);
            let measurement = Measurement { number: self.number, of, round, ranks, variant };
            self.number += 1;
            self.observer.begins(&measurement);
            let run = measure::steps(&case.config, &self.splits, world.threads, warmup, steps);
            self.observer.ends(&measurement, run.as_ref().map(Run::tokens_per_sec));
            match run {
                Ok(run) => runs.push(run),
                Err(error) => case.runs = Err(error),
            }
        }
        if let Some(case) = world.cases.iter().find(|case| case.runs.is_ok()) {
            let gemm = measure::gemm(&case.config, world.threads)?;
            if world.gemm.as_ref().is_none_or(|best| best.flops_per_sec < gemm.flops_per_sec) {
                world.gemm = Some(gemm);
            }
        }
        Ok(())
    }
}

/// How many cases are possible; at least one must be.
fn require_any(worlds: &[World]) -> Result<usize, Error> {
    let cases = || worlds.iter().flat_map(|w| w.cases.iter().map(move |case| (w.ranks, case)));
    let possible = cases().filter(|(_, case)| case.runs.is_ok()).count();
    let first = cases().find_map(|(ranks, case)| Some((ranks, case, case.runs.as_ref().err()?)));
    match first {
        Some((ranks, case, cause)) if possible == 0 => {
            let (variant, cause) = (case.variant, cause.to_string());
            Err(Error::NothingMeasured { variant, ranks, cause })
        }
        _ => Ok(possible),
    }
}

/// In ascending order, each once.
fn ascending(numbers: &[usize]) -> Vec<usize> {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    sorted
}

/// In the order given, each once.
fn distinct(variants: &[Variant]) -> Vec<Variant> {
    let mut kept = Vec::new();
    for variant in variants {
        if !kept.contains(variant) {
            kept.push(*variant);
        }
    }
    kept
}
