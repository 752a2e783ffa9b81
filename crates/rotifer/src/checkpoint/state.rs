//! `state.json`: what a run needs beside its tensors to go on as if nothing had happened.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::disk::io_error;
use super::{Disk, steps};
use crate::config::Config;
use crate::data::Dataset;
use crate::error::{Error, Result};
use crate::hash::mix;

/// Name of the file in a checkpoint's folder; it is written last.
pub const STATE: &str = "state.json";

/// What this version writes and reads.
const VERSION: u32 = 1;

/// Longest `state.json` that is read.
const STATE_BYTES_MAX: u64 = 1 << 20;

/// Windows that are looked at to tell one data set from another.
const WINDOWS_HASHED: u64 = 64;

/// What can be said of training data without its name, which may change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataFacts {
    /// Tokens to train on.
    pub tokens: u64,
    /// A hash, in hexadecimal digits, of windows from all over.
    pub hash: String,
}

impl DataFacts {
    /// Looks at up to 64 windows of `seq` tokens.
    #[must_use]
    pub fn of(data: &Dataset, seq: usize) -> DataFacts {
        let windows = data.num_windows(seq);
        let (mut inputs, mut targets) = (vec![0; seq], vec![0; seq]);
        let mut hash = 0;
        let looked_at = windows.min(WINDOWS_HASHED);
        for i in 0..looked_at {
            // The first, the last, and as many between, evenly.
            let between =
                u128::from(i) * u128::from(windows - 1) / u128::from(looked_at.max(2) - 1);
            data.window(between as u64, seq, &mut inputs, &mut targets, None);
            let mixed = |h: u64, token: &i32| mix(h ^ u64::from(token.cast_unsigned()));
            hash = inputs.iter().fold(hash, mixed);
        }
        DataFacts { tokens: data.len_tokens(), hash: format!("{hash:016x}") }
    }
}

/// Who wrote a checkpoint; nobody needs it to load one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedBy {
    /// Version of this crate.
    pub rotifer: String,
    /// Number of ranks.
    pub ranks: usize,
    /// Name of the strategy.
    pub strategy: String,
}

/// The content of `state.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Version of the format.
    pub version: u32,
    /// Steps done.
    pub step: u64,
    /// Updates of the weights, of which the optimiser's corrections depend.
    pub updates: u64,
    /// Rows of the data's order that the run has seen: the next step begins there.
    pub rows: u64,
    /// Elements of all parameters.
    pub parameters: u64,
    /// Kinds of optimiser state: the first parts of the names in `optimizer.safetensors`.
    pub optimizer: Vec<String>,
    /// What it was trained on.
    pub data: DataFacts,
    /// Who wrote it.
    pub saved_by: SavedBy,
    /// The config of the run.
    pub config: Config,
    /// Name and size of every other file of the checkpoint.
    pub files: BTreeMap<String, u64>,
}

/// How far a run has come.
#[derive(Clone, Debug)]
pub struct Progress<'a> {
    /// Steps done.
    pub step: u64,
    /// Rows of the data's order that it has seen.
    pub rows: u64,
    /// What it is trained on.
    pub data: &'a DataFacts,
    /// Its config.
    pub config: &'a Config,
}

impl Progress<'_> {
    pub(super) fn state(
        &self,
        updates: u64,
        parameters: u64,
        optimizer: &[&str],
        saved_by: SavedBy,
        files: BTreeMap<String, u64>,
    ) -> State {
        State {
            version: VERSION,
            step: self.step,
            updates,
            rows: self.rows,
            parameters,
            optimizer: optimizer.iter().map(|kind| (*kind).to_owned()).collect(),
            data: self.data.clone(),
            saved_by,
            config: self.config.clone(),
            files,
        }
    }
}

/// A checkpoint that a run can go on from: it is whole.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    state: State,
}

impl Checkpoint {
    /// The checkpoint in `path`: a checkpoint's folder, or that of a run, whose newest it is.
    ///
    /// # Errors
    /// If there is none, it was written by a newer version, or a file of it is missing, damaged or
    /// of another size than it was.
    pub fn find(path: &Path) -> Result<Checkpoint> {
        let folder = steps::find(path)?;
        let state = read(&folder.join(STATE))?;
        for (name, bytes) in &state.files {
            let path = folder.join(name);
            let bad = |what| Err(Error::Checkpoint { path: path.clone(), what });
            if Path::new(name).file_name().is_none_or(|plain| plain != name.as_str()) {
                return bad(format!("is named in {STATE}, but is no name of a file in its folder"));
            }
            let found = fs::metadata(&path).map_err(io_error("open", &path))?.len();
            if found != *bytes {
                return bad(format!("has {found} bytes, but was saved with {bytes}"));
            }
        }
        Ok(Checkpoint { folder, state })
    }

    /// Where it is.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What it says.
    #[must_use]
    pub const fn state(&self) -> &State {
        &self.state
    }

    /// The folder of the run that it lies in, if it lies in one.
    #[must_use]
    pub fn run(&self) -> Option<&Path> {
        steps::run_of(&self.folder)
    }

    /// Lets `latest` of its run name it, as before a run goes on from an older checkpoint than its
    /// newest. One rank calls this.
    ///
    /// # Errors
    /// If the folder of the run cannot be written.
    pub fn make_latest(&self) -> Result<()> {
        match self.run() {
            Some(run) => steps::point_at(&Disk::new(), run, self.state.step),
            None => Ok(()),
        }
    }

    /// Checks that a run of `config` on `data` is the run of this checkpoint. What does not change
    /// its results may differ: ranks, strategy, threads, micro-batches, the number of steps,
    /// evaluation, logging, checkpoints, samples, what is recomputed, and where the same data lies.
    ///
    /// # Errors
    /// The first key that differs, with both values.
    pub fn require_same_run(&self, config: &Config, data: &DataFacts) -> Result<()> {
        let differs = |key: String, now: String, saved: String| {
            let folder = self.folder.clone();
            Err(Error::OtherRun { folder, key, now, saved })
        };
        let (now, saved) = (keys(config), keys(&self.state.config));
        let all: std::collections::BTreeSet<_> = now.keys().chain(saved.keys()).collect();
        let text = |value: Option<&serde_json::Value>| {
            value.map_or_else(|| "not set".to_owned(), ToString::to_string)
        };
        for key in all.into_iter().filter(|key| !may_differ(key)) {
            let (now, saved) = (now.get(key), saved.get(key));
            if now != saved {
                return differs(key.clone(), text(now), text(saved));
            }
        }
        if *data != self.state.data {
            let tokens = |data: &DataFacts| format!("{} tokens ({})", data.tokens, data.hash);
            return differs("data.train".into(), tokens(data), tokens(&self.state.data));
        }
        Ok(())
    }
}

/// Keys that change no result of a run.
fn may_differ(key: &str) -> bool {
    let sections = ["ranks.", "sample.", "checkpoint."];
    let keys = [
        // The same numbers by another way.
        "model.mlp_hidden",
        "model.logits",
        "model.embedding",
        // What is read is compared, not where it lies.
        "data.train",
        "data.validation",
        "data.validation_fraction",
        "train.steps",
        "train.accumulation",
        "train.eval_every",
        "train.eval_batches",
        "train.log_every",
        "train.out",
    ];
    sections.iter().any(|section| key.starts_with(section)) || keys.contains(&key)
}

/// Every key that a config sets, `section.key`, with its value.
fn keys(config: &Config) -> BTreeMap<String, serde_json::Value> {
    let value = serde_json::to_value(config).expect("a config is always JSON");
    let mut keys = BTreeMap::new();
    for (section, values) in value.as_object().into_iter().flatten() {
        for (key, value) in values.as_object().into_iter().flatten() {
            keys.insert(format!("{section}.{key}"), value.clone());
        }
    }
    keys
}

/// Reads a `state.json` and checks it.
fn read(path: &Path) -> Result<State> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }

    let bad = |what: String| Error::Checkpoint { path: path.into(), what };
    let file = File::open(path).map_err(io_error("open", path))?;
    let mut text = Vec::new();
    file.take(STATE_BYTES_MAX + 1).read_to_end(&mut text).map_err(io_error("read", path))?;
    if text.len() as u64 > STATE_BYTES_MAX {
        return Err(bad(format!("is longer than {STATE_BYTES_MAX} bytes")));
    }
    let Versioned { version } = serde_json::from_slice(&text)
        .map_err(|e| bad(format!("says no version of a checkpoint: {e}")))?;
    if version != VERSION {
        return Err(bad(format!(
            "is version {version}, but this rotifer reads version {VERSION}; take the rotifer that \
             wrote it"
        )));
    }
    let state: State = serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?;
    state.config.validate().map_err(|e| bad(format!("has a config in which {e}")))?;
    let batch = state.config.train.batch as u64;
    if state.step.checked_mul(batch) != Some(state.rows) || state.updates > state.step {
        return Err(bad(format!(
            "has {} rows and {} updates in {} steps of {batch} rows",
            state.rows, state.updates, state.step
        )));
    }
    Ok(state)
}
