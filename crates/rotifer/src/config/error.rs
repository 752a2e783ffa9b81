//! What can be wrong with a config.

use std::fmt;
use std::path::PathBuf;

use crate::strategy::Strategy;

/// Where a key stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a line of the file.
    Line {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
    },
    /// In the file, where a key is absent.
    File {
        /// The file.
        path: PathBuf,
    },
    /// In an override, as given.
    Set {
        /// `section.key=value`.
        set: String,
    },
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Line { path, line } => write!(f, "{}:{line}", path.display()),
            Place::File { path } => write!(f, "{}", path.display()),
            Place::Set { set } => write!(f, "--set {set}"),
        }
    }
}

/// A config that cannot be read, or that asks for what cannot be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file that cannot be read.
    #[error("cannot read the config {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A file that is not TOML.
    #[error("{place}: {message}")]
    Syntax {
        /// Where it goes wrong.
        place: Place,
        /// What is expected there.
        message: String,
    },
    /// An override that is none.
    #[error("--set {set}: write it as section.key=value, such as --set train.steps=100")]
    Set {
        /// The override.
        set: String,
    },
    /// A key that does not exist.
    #[error("{place}: there is no {key}; {advice}")]
    UnknownKey {
        /// Where it stands.
        place: Place,
        /// The key, with its section.
        key: String,
        /// The nearest key that exists, or all of them.
        advice: String,
    },
    /// A key that must be there.
    #[error("{place}: {key} is missing")]
    MissingKey {
        /// The file.
        place: Place,
        /// The section, or the key with its section.
        key: String,
    },
    /// A value of the wrong type or an unknown name.
    #[error("{place}: {key}: {message}")]
    Value {
        /// Where it stands.
        place: Place,
        /// The key, with its section.
        key: String,
        /// What is there and what is allowed.
        message: String,
    },
    /// A number out of its range.
    #[error("{key} is {value}; it must be {allowed}")]
    Range {
        /// The key, with its section.
        key: &'static str,
        /// Its value.
        value: f64,
        /// What it may be.
        allowed: &'static str,
    },
    /// Sizes that no machine has room for.
    #[error(
        "the sizes of [model] and train.batch make {weights:e} weights and {activations:e} \
         activations, more than any machine holds; look for a size with too many digits"
    )]
    TooLarge {
        /// Number of weights, about.
        weights: f64,
        /// Number of activations of one step, about.
        activations: f64,
    },
    /// Heads that are wider than the kernels.
    #[error(
        "model.width = {width} over model.heads = {heads} makes heads of {} channels; at most \
         {most} are built, so take {} heads or more",
        width / heads, width.div_ceil(*most)
    )]
    HeadTooWide {
        /// Number of heads.
        heads: usize,
        /// Columns of the stream.
        width: usize,
        /// Most channels of a head.
        most: usize,
    },
    /// Heads of unequal width.
    #[error(
        "model.heads = {heads} does not divide model.width = {width}; the nearest widths that it \
         divides are {} and {}",
        width / heads * heads, (width / heads + 1) * heads
    )]
    HeadsDoNotDivideWidth {
        /// Number of heads.
        heads: usize,
        /// Width of the stream.
        width: usize,
    },
    /// Sequences beyond the last position.
    #[error("data.seq = {seq} exceeds model.context = {context}: shorten it or raise the context")]
    SeqExceedsContext {
        /// Tokens per sequence.
        seq: usize,
        /// Positions of the model.
        context: usize,
    },
    /// A link that nothing would go over.
    #[error(
        "a simulated link needs ranks.hop = \"copy\" and ranks.link_gbps: shards that are \
         handed over take no link"
    )]
    LinkWithoutCopies,
    /// Ranks without a row.
    #[error(
        "ranks.count = {ranks} ranks cannot share train.batch = {batch} rows: raise the batch or \
         lower the number of ranks"
    )]
    RanksExceedBatch {
        /// Number of ranks.
        ranks: usize,
        /// Rows of the global batch.
        batch: usize,
    },
    /// Micro-batches without a row.
    #[error(
        "train.batch = {batch} on {ranks} ranks is at most {rows} rows each, too few for \
         train.accumulation = {accumulation} micro-batches: lower it or raise the batch"
    )]
    AccumulationExceedsRows {
        /// Rows of the global batch.
        batch: usize,
        /// Number of ranks.
        ranks: usize,
        /// Most rows that a rank sees.
        rows: usize,
        /// Number of micro-batches.
        accumulation: usize,
    },
    /// Under tensor parallelism, heads that cannot be shared evenly.
    #[error(
        "ranks.strategy = \"tp\" gives whole heads to each rank, but model.heads = {heads} \
         does not divide by ranks.count = {ranks}: take another number of ranks, or \"rtp\", \
         which has no such limit"
    )]
    HeadsDoNotDivideRanks {
        /// Number of heads.
        heads: usize,
        /// Number of ranks.
        ranks: usize,
    },
    /// Tokens that should tour the ranks where there is no ring.
    #[error(
        "model.embedding = \"rows\" lets tokens tour the ring, which ranks.strategy = \
         \"{strategy}\" does not have: take \"auto\" or \"table\", or strategy = \"rtp\""
    )]
    RowsOnlyRotate {
        /// The strategy.
        strategy: Strategy,
    },
    /// A setting that the strategy would not read.
    #[error(
        "{key} is for ranks.strategy = \"{reader}\" and means nothing to \"{strategy}\": leave it \
         out, or take strategy = \"{reader}\""
    )]
    NotRead {
        /// The key, with its section.
        key: &'static str,
        /// The strategy.
        strategy: Strategy,
        /// The strategy that reads it.
        reader: Strategy,
    },
    /// More than one rank that is alone.
    #[error(
        "ranks.strategy = \"single\" is for one rank, but ranks.count = {ranks}: set strategy = \
         \"rtp\" or count = 1"
    )]
    SingleWithRanks {
        /// Number of ranks.
        ranks: usize,
    },
    /// A schedule that does not fit into the run.
    #[error(
        "schedule.warmup_steps = {warmup_steps} and a fall of {decay_steps} steps exceed \
         train.steps = {steps}: shorten them or train longer"
    )]
    ScheduleExceedsSteps {
        /// Steps of the warm-up.
        warmup_steps: u64,
        /// Steps of a wsd schedule's fall, otherwise 0.
        decay_steps: u64,
        /// Steps of the run.
        steps: u64,
    },
    /// Validation data named and cut off at once.
    #[error(
        "data.validation names files and data.validation_fraction is {fraction}: use one of them"
    )]
    TwoValidations {
        /// The fraction.
        fraction: f64,
    },
    /// Evaluation of nothing.
    #[error(
        "train.eval_every is {eval_every}, but there is no validation data: set data.validation or \
         data.validation_fraction, or eval_every = 0"
    )]
    NothingToEvaluate {
        /// Steps between two evaluations.
        eval_every: u64,
    },
}
