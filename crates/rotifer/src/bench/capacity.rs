//! The largest model that fits a limit of bytes per rank, under each strategy.

use rotifer_device::MemoryPlan;
use serde::Serialize;

use super::{
    Bytes, Error, FORMAT, Variant, ascending, distinct, measure, plan_of, require_cases,
    threads_per_rank,
};
use crate::config::{Config, bytes_of};
use crate::data::Splits;
use crate::error::Result;
use crate::models::gpt2;
use crate::train;

/// Most layers that are looked for: beyond that the names of the layers alone fill a machine.
pub const LAYERS_MAX: usize = 1 << 16;

/// What to look for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapacityOptions {
    /// Numbers of ranks, in any order.
    pub ranks: Vec<usize>,
    /// The strategies.
    pub variants: Vec<Variant>,
    /// Most bytes of one rank.
    pub bytes: u64,
    /// Whether to train one step of each model that is found.
    pub verify: bool,
    /// Cores that the ranks share in that step.
    pub cores: usize,
}

/// What fits, by strategy and number of ranks.
#[derive(Clone, Debug, Serialize)]
pub struct CapacityReport {
    /// [`FORMAT`].
    pub format: u32,
    /// Version of the crate that searched.
    pub rotifer: &'static str,
    /// Name of the config.
    pub config: String,
    /// Most bytes of one rank.
    pub bytes_limit: u64,
    /// By number of ranks, then in the order of the strategies.
    pub rows: Vec<CapacityRow>,
}

/// What one strategy can hold on one number of ranks.
#[derive(Clone, Debug, Serialize)]
pub struct CapacityRow {
    /// Number of ranks.
    pub ranks: usize,
    /// The strategy.
    pub strategy: Variant,
    /// What was found: one of the fields `found`, `too_small` and `not_possible`.
    #[serde(flatten)]
    pub search: Search,
}

/// What came of one search.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Search {
    /// The largest model that fits.
    Found(Found),
    /// Not even one layer fits; it needs these bytes per rank.
    TooSmall(Bytes),
    /// The strategy is not possible, for this reason.
    NotPossible(String),
}

/// The largest model that fits.
#[derive(Clone, Debug, Serialize)]
pub struct Found {
    /// Its layers; [`LAYERS_MAX`] of them may not be all that fit.
    pub layers: usize,
    /// Elements of all its parameters, each counted once.
    pub parameters: u64,
    /// Bytes of the rank that has most.
    pub peak: Bytes,
    /// What came of training one step of it, if that was asked for.
    pub verified: Option<Verified>,
}

/// What came of training one step.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verified {
    /// It works.
    Trained {
        /// Mean loss per target token.
        loss: f64,
        /// Seconds that the step took.
        step_secs: f64,
    },
    /// The model fits its limit, but this machine could not train it.
    Failed(String),
}

/// The text as a number of bytes: `65536`, `512MiB`, `1.5GiB`.
///
/// # Errors
/// If it is none.
pub fn parse_bytes(text: &str) -> Result<u64, Error> {
    let bytes = bytes_of(text).ok_or_else(|| Error::Bytes { text: text.to_owned() })?;
    Ok(bytes as u64)
}

/// Finds, for each strategy and number of ranks, the most layers of the config's model whose plan
/// keeps within a limit of bytes on every rank. All else is as in the config, the global batch too.
/// `on_row` is told of each result.
///
/// What is counted is what a rank then allocates, to the byte; what is not in its arena (packing
/// buffers, token ids of one micro-batch) comes on top.
///
/// # Errors
/// If there is nothing to look for or the data cannot be read.
pub fn capacity(
    config: &Config,
    options: &CapacityOptions,
    on_row: &dyn Fn(&CapacityRow),
) -> Result<CapacityReport> {
    require_cases(&options.ranks, &options.variants)?;
    let splits = Variant::Rtp.config(config, 1).open_data()?;
    let mut rows = Vec::new();
    for ranks in ascending(&options.ranks) {
        let threads = threads_per_rank(config, options.cores, ranks);
        for strategy in distinct(&options.variants) {
            let config = strategy.config(config, ranks);
            let search = search(&config, &splits, options, threads)
                .unwrap_or_else(|cause| Search::NotPossible(cause.to_string()));
            rows.push(CapacityRow { ranks, strategy, search });
            on_row(&rows[rows.len() - 1]);
        }
    }
    Ok(CapacityReport {
        format: FORMAT,
        rotifer: env!("CARGO_PKG_VERSION"),
        config: config.name().to_owned(),
        bytes_limit: options.bytes,
        rows,
    })
}

fn search(
    config: &Config,
    splits: &Splits,
    options: &CapacityOptions,
    threads: usize,
) -> Result<Search> {
    let within = |plan: &MemoryPlan| plan.total() as u64 <= options.bytes;
    let smallest = plan_of(&with_layers(config, 1), splits)?;
    if !within(&smallest) {
        return Ok(Search::TooSmall((&smallest).into()));
    }
    // What one layer can do, more can, unless it is too many to be counted.
    let fits = |layers| plan_of(&with_layers(config, layers), splits).is_ok_and(|p| within(&p));
    let layers = largest(LAYERS_MAX, fits);
    let config = with_layers(config, layers);
    let plan = plan_of(&config, splits)?;
    let alone = Variant::Rtp.config(&config, 1);
    let parameters = train::num_parameters(&mut gpt2(&alone.gpt2()), &alone.train_options(splits))?;
    let verified = options.verify.then(|| match measure::steps(&config, splits, threads, 0, 1) {
        Ok(run) => {
            assert_eq!(run.plan, plan, "a rank allocates what was counted");
            Verified::Trained { loss: run.loss, step_secs: run.steps[0].secs }
        }
        Err(cause) => Verified::Failed(cause.to_string()),
    });
    Ok(Search::Found(Found { layers, parameters, peak: (&plan).into(), verified }))
}

fn with_layers(config: &Config, layers: usize) -> Config {
    let mut config = config.clone();
    config.model.layers = layers;
    config
}

/// The largest number up to `max` that fits, given that 1 does and that nothing fits above one that
/// does not: doubles until one does not, then halves what is between.
fn largest(max: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (1, 2);
    while high <= max && fits(high) {
        (low, high) = (high, 2 * high);
    }
    high = high.min(max + 1);
    while high - low > 1 {
        let middle = low.midpoint(high);
        if fits(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::largest;

    #[test]
    fn the_largest_that_fits_is_found() {
        for max in [1, 2, 5, 64] {
            for bound in 1..70 {
                assert_eq!(largest(max, |n| n <= bound), bound.min(max), "{bound} of {max}");
            }
        }
    }
}
