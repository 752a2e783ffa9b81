//! What can go wrong.

use std::path::PathBuf;

use crate::strategy::Strategy;
use crate::{bench, config, data};

/// The result of anything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong, with the operands and what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A config that cannot be read or contradicts itself.
    #[error(transparent)]
    Config(#[from] config::Error),
    /// Data that is missing or damaged.
    #[error(transparent)]
    Data(#[from] data::Error),
    /// A benchmark that cannot be run.
    #[error(transparent)]
    Bench(#[from] bench::Error),
    /// A rank that is silent, out of step or has failed.
    #[error(transparent)]
    Ring(#[from] rotifer_ring::Error),
    /// The operating system refused a rank's threads.
    #[error(transparent)]
    Threads(#[from] rotifer_device::ThreadsError),
    /// A rank needs more memory than there is.
    #[error(transparent)]
    OutOfMemory(#[from] rotifer_device::OutOfMemory),
    /// A rank failed; the first to do so.
    #[error(transparent)]
    Rank(Box<rotifer_ring::launch::Failure<Error>>),
    /// A layer got an input of another width than it was made for.
    #[error(
        "layer {layer} takes {expected} columns, but its input has {got}; change one of the two \
         widths"
    )]
    Width {
        /// Name of the layer.
        layer: String,
        /// Columns that it takes.
        expected: usize,
        /// Columns that it was given.
        got: usize,
    },
    /// Two layers share a unit but do not agree on it.
    #[error("unit {unit} is shared by layers that disagree: one wants {first}, another {second}")]
    UnitMismatch {
        /// Name of the unit.
        unit: String,
        /// Rows and tensors that the first one wants.
        first: String,
        /// Rows and tensors that the other wants.
        second: String,
    },
    /// Two parameters of one name.
    #[error("two parameters of the model are named {tensor}; give the layers different names")]
    SameName {
        /// The name.
        tensor: String,
    },
    /// Under tensor parallelism, heads that cannot be shared evenly.
    #[error(
        "attention {layer}: tp gives whole heads to each rank, but {heads} query and {kv_heads} \
         key/value heads do not divide by {world} ranks; take another number of ranks, or rtp, \
         which has no such limit"
    )]
    HeadsDoNotDivide {
        /// Name of the layer.
        layer: String,
        /// Query heads.
        heads: usize,
        /// Key and value heads.
        kv_heads: usize,
        /// Number of ranks.
        world: usize,
    },
    /// Under tensor parallelism, a linear layer that is not one of a pair.
    #[error(
        "linear layer {layer}: tp cuts linear layers in pairs only, as those of attention and of \
         an MLP; use these, or another strategy"
    )]
    NotPaired {
        /// Name of the layer.
        layer: String,
    },
    /// Tokens that should tour the ranks where there is no ring.
    #[error(
        "model.embedding = \"rows\" lets tokens tour the ring, which only rtp has, not {strategy}; \
         take \"auto\" or \"table\""
    )]
    RowsOnlyRotate {
        /// The strategy.
        strategy: Strategy,
    },
    /// A shape that the model cannot have.
    #[error("{what}")]
    Shape {
        /// The operands, and what to change.
        what: String,
    },
    /// A loss or gradient norm that is not a number.
    #[error(
        "step {}: the {what} is {value}; no weight was changed by this step. Lower the learning \
         rate, clip the gradient (train.clip_norm) or look at the data of this step", step + 1
    )]
    NotFinite {
        /// Number of the step, from 0; from 1 in the message, as in progress and metrics.
        step: u64,
        /// Loss or gradient norm.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// Replicated parameters that should be equal on all ranks are not.
    #[error(
        "after step {}, {tensor} of rank {rank} differs from rank 0's: this is a bug in rotifer",
        step + 1
    )]
    Diverged {
        /// Number of the step, from 0; from 1 in the message, as in progress and metrics.
        step: u64,
        /// The tensor.
        tensor: String,
        /// The rank.
        rank: usize,
    },
    /// A folder that a run would overwrite.
    #[error("{} exists already; choose another folder (train.out) or remove it", path.display())]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// A file that cannot be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A checkpoint of a run that this one does not continue.
    #[error(
        "{key} is {now}, but {} was trained with {saved}; set it to that, or train anew without \
         --resume", folder.display()
    )]
    OtherRun {
        /// The checkpoint.
        folder: PathBuf,
        /// The key, with its section.
        key: String,
        /// What the config says.
        now: String,
        /// What the checkpoint's config says.
        saved: String,
    },
    /// A checkpoint that leaves nothing to do.
    #[error(
        "{} has {step} steps already, and train.steps is {steps}: raise it to train on",
        folder.display()
    )]
    Finished {
        /// The checkpoint.
        folder: PathBuf,
        /// Steps done.
        step: u64,
        /// Steps wanted.
        steps: u64,
    },
    /// A checkpoint that is damaged or belongs to another model.
    #[error("{}: {what}", path.display())]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// Which tensor or field, and what is wrong with it.
        what: String,
    },
}

impl From<rotifer_ring::launch::Failure<Error>> for Error {
    fn from(failure: rotifer_ring::launch::Failure<Error>) -> Error {
        Error::Rank(Box::new(failure))
    }
}
