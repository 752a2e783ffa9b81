//! The config of a run: one TOML file, and overrides from the command line.
//!
//! An unknown key is an error that names the nearest known one; a value out of range, or two that
//! contradict each other, is an error before anything is allocated or read.

mod check;
mod error;
mod parse;

use std::num::NonZeroUsize;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::checkpoint::DEFAULT_FILE_BYTES_MAX;
use crate::data::{self, ByteTokenizer, Dataset, Splits};
use crate::optim::{LrSchedule, Shape};
pub use error::{Error, Place};
pub(crate) use parse::{bytes_of, nearest};

/// Everything that a run is determined by.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    #[serde(skip)]
    name: String,
    /// Shape of the model.
    pub model: Model,
    /// What it learns from.
    pub data: Data,
    /// How long, in which batches.
    pub train: Train,
    /// The update rule.
    pub optimizer: Optimizer,
    /// The learning rate over time.
    #[serde(default)]
    pub schedule: Schedule,
    /// Who shares the work, and how.
    #[serde(default)]
    pub ranks: Ranks,
    /// When to save, and what to keep.
    #[serde(default)]
    pub checkpoint: Checkpoint,
    /// A text to write after training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample: Option<Sample>,
}

/// `[model]`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Which family.
    #[serde(default)]
    pub kind: ModelKind,
    /// Classes of the head and rows of the token table; the tokenizer's size if it is left out. It
    /// may be larger than that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocab_size: Option<usize>,
    /// Positions that have an embedding: the longest sequence.
    pub context: usize,
    /// Width of the stream; a multiple of `heads`.
    pub width: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Attention heads.
    pub heads: usize,
    /// Hidden columns of an MLP; 4 times the width if it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mlp_width: Option<usize>,
    /// Nonlinearity of the MLPs.
    #[serde(default)]
    pub activation: Activation,
    /// Whether the head uses the token embedding's table. Default true.
    #[serde(default = "yes")]
    pub tied: bool,
    /// Probability that an element of the embedding or of a residual branch is dropped, in [0, 1).
    #[serde(default)]
    pub dropout: f32,
    /// What becomes of the MLPs' hidden activations between forward and backward.
    #[serde(default)]
    pub mlp_hidden: MlpHidden,
    /// What becomes of the logits between forward and backward.
    #[serde(default)]
    pub logits: Logits,
    /// What travels when embeddings are looked up.
    #[serde(default)]
    pub embedding: Embedding,
    /// Standard deviation of initial weights. Default 0.02, as GPT-2.
    #[serde(default = "init_std")]
    pub init_std: f32,
}

/// Model families.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelKind {
    /// GPT-2: learned positions, layer norms before each branch.
    #[default]
    Gpt2,
}

/// Nonlinearities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// GELU by its tanh approximation, as GPT-2.
    #[default]
    GeluTanh,
    /// GELU by the error function.
    GeluErf,
}

/// What becomes of the MLPs' hidden activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MlpHidden {
    /// Kept: fastest.
    #[default]
    Saved,
    /// Made again in backward, one shard at a time: least memory.
    Recomputed,
}

/// What becomes of the logits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Logits {
    /// Made again in backward; they never exist as a whole: least memory.
    #[default]
    Recomputed,
    /// A rank keeps those of its own tokens: one product of the head in four is saved.
    Kept,
}

/// What travels when embeddings are looked up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Embedding {
    /// Whichever is fewer bytes.
    #[default]
    Auto,
    /// The table's shards.
    Table,
    /// The tokens and the rows found so far.
    Rows,
}

/// `[data]`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Data {
    /// Training data: files, folders and globs (see [`Dataset::open`]), one or a list. Relative
    /// paths start in the folder that the command is run in.
    #[serde(deserialize_with = "parse::one_or_more")]
    pub train: Vec<String>,
    /// Validation data, likewise.
    #[serde(
        default,
        deserialize_with = "parse::one_or_more",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub validation: Vec<String>,
    /// Instead of that: the part of the training data, from its end, that is kept for validation.
    #[serde(default)]
    pub validation_fraction: f64,
    /// Field of a `.jsonl` object that holds the text. Default "text".
    #[serde(default = "text_field")]
    pub text_field: String,
    /// How text becomes tokens. `.bin` files hold tokens already: `model.vocab_size` must be set.
    #[serde(default)]
    pub tokenizer: Tokenizer,
    /// Token that ends a document of a `.bin` file, such as 50256 for GPT-2's tokenizer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_of_text: Option<u32>,
    /// Tokens per sequence; the model's context if it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq: Option<usize>,
    /// Whether attention stays within documents.
    #[serde(default)]
    pub document_mask: bool,
    /// Whether each epoch has an order of its own. Default true.
    #[serde(default = "yes")]
    pub shuffle: bool,
}

/// Tokenizers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Tokenizer {
    /// [`ByteTokenizer`]: 257 tokens.
    #[default]
    Bytes,
}

/// `[train]`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Train {
    /// Number of optimiser steps.
    pub steps: u64,
    /// Sequences of one step, over all ranks.
    pub batch: usize,
    /// Micro-batches that a step is worked off in, one after the other: less memory, the same
    /// result. Default 1.
    #[serde(default = "one")]
    pub accumulation: usize,
    /// Decides initial weights, dropout and the order of the data. Default 1.
    #[serde(default = "seed")]
    pub seed: u64,
    /// Steps between two evaluations; 0 for one at the end only.
    #[serde(default)]
    pub eval_every: u64,
    /// Batches of validation data of an evaluation; 0 for all.
    #[serde(default)]
    pub eval_batches: u64,
    /// Steps between two lines of the log. Default 1.
    #[serde(default = "log_every")]
    pub log_every: u64,
    /// Bound of the norm of the whole gradient; none if it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f32>,
    /// Folder of checkpoints and metrics, new or empty; if it is left out, one that is new, below
    /// `runs/` and with the name of the config.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out: Option<PathBuf>,
}

/// `[optimizer]`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Optimizer {
    /// The update rule.
    #[serde(default)]
    pub kind: OptimizerKind,
    /// Highest learning rate.
    pub lr: f64,
    /// AdamW: decay rate of the first moment. Default 0.9.
    #[serde(default = "beta1")]
    pub beta1: f32,
    /// AdamW: decay rate of the second moment. Default 0.95.
    #[serde(default = "beta2")]
    pub beta2: f32,
    /// AdamW: added to the root of the second moment. Default 1e-8.
    #[serde(default = "eps")]
    pub eps: f32,
    /// Weight decay, decoupled, of matrices and tables. Default 0.1.
    #[serde(default = "weight_decay")]
    pub weight_decay: f32,
    /// SGD: momentum. Default 0.9.
    #[serde(default = "momentum")]
    pub momentum: f32,
}

/// Update rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerKind {
    /// AdamW.
    #[default]
    #[serde(rename = "adamw")]
    AdamW,
    /// Stochastic gradient descent with momentum.
    Sgd,
}

/// `[schedule]`: see [`LrSchedule::lr`] for the formulas.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Schedule {
    /// How the learning rate goes on after the warm-up.
    pub kind: ScheduleKind,
    /// Steps of the warm-up.
    pub warmup_steps: u64,
    /// The final learning rate as a fraction of the highest; a constant one does not read it.
    /// Default 0.1.
    pub final_lr_ratio: f64,
    /// Steps of the fall of a wsd schedule; a tenth of all steps if it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
}

impl Default for Schedule {
    fn default() -> Schedule {
        let kind = ScheduleKind::default();
        Schedule { kind, warmup_steps: 0, final_lr_ratio: 0.1, decay_steps: None }
    }
}

/// Shapes of schedules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    /// It stays.
    #[default]
    Constant,
    /// A straight line.
    Linear,
    /// Half a cosine.
    Cosine,
    /// Warmup-stable-decay: it stays, then falls at the end.
    Wsd,
}

/// `[ranks]`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Ranks {
    /// Number of ranks.
    pub count: usize,
    /// Threads of each rank; the machine's cores, divided among the ranks, if it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<NonZeroUsize>,
    /// What the ranks hold and exchange.
    pub strategy: Strategy,
    /// Whether what moves between ranks does so while they compute, which may take spare buffers.
    /// Default true.
    pub overlap: bool,
    /// fsdp: whether a unit is given up between forward and backward. Default true.
    pub reshard_after_forward: bool,
    /// How a shard gets from rank to rank within one process.
    pub hop: Hop,
    /// Bound of one travelling shard in bytes, such as "4MiB"; a unit whose shard is larger travels
    /// in groups of rows. Default 4 MiB.
    #[serde(deserialize_with = "parse::bytes")]
    pub travel_bytes_max: usize,
    /// Seconds after which a silent rank counts as lost. Default 60.
    pub deadline_secs: u64,
    /// Gigabits per second of a link between ranks to be simulated, over which copied hops and
    /// collectives then take as long as over a network; none if it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_gbps: Option<f64>,
    /// Its latency in microseconds. Default 0.
    pub link_latency_us: f64,
}

impl Default for Ranks {
    fn default() -> Ranks {
        Ranks {
            count: 1,
            threads: None,
            strategy: Strategy::default(),
            overlap: true,
            reshard_after_forward: true,
            hop: Hop::default(),
            travel_bytes_max: 4 << 20,
            deadline_secs: 60,
            link_gbps: None,
            link_latency_us: 0.0,
        }
    }
}

/// Strategies: see [`strategy`](crate::strategy).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// Rotated tensor parallelism: shards of the weights travel round the ranks.
    #[default]
    Rtp,
    /// Data parallelism: every rank has all weights, gradients are summed.
    Ddp,
    /// The same, with the optimiser state shared.
    Zero1,
    /// Fully sharded data parallelism: units are gathered where they are used.
    Fsdp,
    /// Tensor parallelism: shards stay, every rank sees the whole batch.
    Tp,
    /// One rank.
    Single,
}

/// How a shard gets from rank to rank within one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Hop {
    /// Its handle does: no byte moves.
    #[default]
    HandOver,
    /// Its bytes do, as they would over a network.
    Copy,
}

/// `[checkpoint]`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Checkpoint {
    /// Steps between two checkpoints; 0 for one at the end only.
    pub every: u64,
    /// Checkpoints that are kept, the newest ones; 0 for all. Default 3.
    pub keep: usize,
    /// Size of a file of tensors that is not exceeded unless a single tensor does, such as "5GB",
    /// the default. More than one file has an index.
    #[serde(deserialize_with = "parse::bytes")]
    pub file_bytes_max: usize,
}

impl Default for Checkpoint {
    fn default() -> Checkpoint {
        Checkpoint { every: 0, keep: 3, file_bytes_max: DEFAULT_FILE_BYTES_MAX }
    }
}

/// `[sample]`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// How the text begins; it may be empty.
    pub prompt: String,
    /// Tokens to add. Default 200.
    #[serde(default = "sample_tokens")]
    pub tokens: usize,
    /// Divides the logits; 0 always takes the most likely token. Default 1.
    #[serde(default = "temperature")]
    pub temperature: f32,
    /// Takes only the most likely tokens that have this probability together; all if it is left
    /// out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f32>,
}

/// A default that serde can name.
macro_rules! defaults {
    ($($name:ident: $kind:ty = $value:expr;)*) => {
        $(fn $name() -> $kind { $value })*
    };
}

defaults! {
    yes: bool = true;
    one: usize = 1;
    init_std: f32 = 0.02;
    text_field: String = data::Options::default().text_field;
    seed: u64 = 1;
    log_every: u64 = 1;
    beta1: f32 = 0.9;
    beta2: f32 = 0.95;
    eps: f32 = 1e-8;
    weight_decay: f32 = 0.1;
    momentum: f32 = 0.9;
    sample_tokens: usize = 200;
    temperature: f32 = 1.0;
}

impl Config {
    /// Name of the run: that of the config's file, without its extension.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Tokens per sequence.
    #[must_use]
    pub fn seq(&self) -> usize {
        self.data.seq.unwrap_or(self.model.context)
    }

    /// Classes of the model.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.model.vocab_size.unwrap_or(match self.data.tokenizer {
            Tokenizer::Bytes => ByteTokenizer::VOCAB_SIZE,
        })
    }

    /// Hidden columns of an MLP.
    #[must_use]
    pub fn mlp_width(&self) -> usize {
        self.model.mlp_width.unwrap_or(4 * self.model.width)
    }

    /// The learning rate by step.
    #[must_use]
    pub fn lr_schedule(&self) -> LrSchedule {
        let Schedule { kind, warmup_steps, final_lr_ratio: final_ratio, .. } = self.schedule;
        let shape = match kind {
            ScheduleKind::Constant => Shape::Constant,
            ScheduleKind::Linear => Shape::Linear,
            ScheduleKind::Cosine => Shape::Cosine,
            ScheduleKind::Wsd => Shape::WarmupStableDecay { decay_steps: self.decay_steps() },
        };
        let (peak, steps) = (self.optimizer.lr, self.train.steps);
        LrSchedule { peak, warmup_steps, steps, final_ratio, shape }
    }

    fn decay_steps(&self) -> u64 {
        self.schedule.decay_steps.unwrap_or((self.train.steps / 10).max(1))
    }

    /// Opens training and validation data and checks that there is enough for the ranks.
    ///
    /// # Errors
    /// As [`Dataset::open`]; if the training data has fewer sequences than there are ranks; if text
    /// and tokens are mixed; if `data.document_mask` is on but no token ends a document.
    pub fn open_data(&self) -> Result<Splits, data::Error> {
        let Data { train, validation, validation_fraction, text_field, .. } = &self.data;
        let options = data::Options {
            text_field: text_field.clone(),
            vocab_size: self.model.vocab_size,
            end_of_text: self.data.end_of_text,
        };
        let all = Dataset::open(train, &options)?;
        if self.data.document_mask && all.end_of_text().is_none() {
            return Err(data::Error::NoEndOfText);
        }
        let (train, validation) = if !validation.is_empty() {
            let validation = Dataset::open(validation, &options)?;
            all.require_same_kind(&validation)?;
            (all, Some(validation))
        } else if *validation_fraction > 0.0 {
            let (train, validation) = all.split(*validation_fraction);
            (train, Some(validation))
        } else {
            (all, None)
        };
        train.require_windows("training", self.seq(), self.ranks.count)?;
        if let Some(validation) = &validation {
            // The last rows of an evaluation may leave ranks without any.
            validation.require_windows("validation", self.seq(), 1)?;
        }
        Ok(Splits { train, validation })
    }
}
