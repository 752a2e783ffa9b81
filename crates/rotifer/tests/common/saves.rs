//! Runs that save and go on, and all that they hold.

use std::collections::BTreeMap;
use std::path::Path;

use rotifer::Result;
use rotifer::checkpoint::{self, Checkpoint, DataFacts, Disk, Progress, Saving};
use rotifer::config::Config;
use rotifer::models::{Decoder, Gpt2, HfConfig, gpt2};
use rotifer::train::{StepReport, TrainOptions, Trainer};

use super::{Hops, Part, Tokens, assemble, on_ranks, options, pieces, tiny};

/// Weights and optimiser states, whole.
pub type States = Vec<BTreeMap<String, Vec<f32>>>;

/// Weights and optimiser states of a run.
#[derive(Debug, PartialEq)]
pub struct Snapshot(pub States);

impl Snapshot {
    /// Puts what all ranks hold together.
    pub fn assemble(ranks: Vec<Vec<Vec<Part>>>) -> Snapshot {
        let kinds = ranks[0].len();
        let mut by_kind: Vec<Vec<Vec<Part>>> = (0..kinds).map(|_| Vec::new()).collect();
        for rank in ranks {
            for (kind, parts) in by_kind.iter_mut().zip(rank) {
                kind.push(parts);
            }
        }
        Snapshot(by_kind.into_iter().map(assemble).collect())
    }
}

/// One rank's part of all that it holds: weights, then each optimiser state.
pub fn snapshot(trainer: &Trainer<'_, Decoder>) -> Vec<Vec<Part>> {
    let (dev, params) = (trainer.device(), trainer.params());
    let weights = pieces(dev, params, |piece| piece.weights);
    let states = trainer.options().optimizer.states();
    let state = |i: usize| pieces(dev, params, |piece| piece.states[i]);
    std::iter::once(weights).chain((0..states).map(state)).collect()
}

pub fn assert_bits(what: &str, got: &Snapshot, want: &Snapshot) {
    assert_eq!(got.0.len(), want.0.len(), "{what}: as many states");
    for (got, want) in got.0.iter().zip(&want.0) {
        assert!(got.keys().eq(want.keys()), "{what}: the same tensors");
        for (name, values) in want {
            let same = got[name].iter().zip(values).all(|(g, w)| g.to_bits() == w.to_bits());
            assert!(same && got[name].len() == values.len(), "{what}: {name}");
        }
    }
}

/// A config of the tests' sizes. Only what a checkpoint says of its run depends on it.
pub fn progress_config(sets: &[&str]) -> Config {
    let text = "
        [model]
        context = 24
        width = 40
        layers = 2
        heads = 5
        [data]
        train = \"text.txt\"
        seq = 19
        [train]
        steps = 100
        batch = 7
        clip_norm = 1.0
        [optimizer]
        lr = 3e-3
    ";
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    Config::parse(text, Path::new("tiny.toml"), &sets).expect("a valid config")
}

pub fn facts() -> DataFacts {
    DataFacts { tokens: 1000, hash: "0123456789abcdef".to_owned() }
}

/// Saves a checkpoint after as many steps as the trainer has done.
pub fn save(trainer: &Trainer<'_, Decoder>, run: &Path, disk: &Disk, keep: usize) -> Result<()> {
    save_in_files(trainer, run, disk, keep, checkpoint::DEFAULT_FILE_BYTES_MAX)
}

fn save_in_files(
    trainer: &Trainer<'_, Decoder>,
    run: &Path,
    disk: &Disk,
    keep: usize,
    file_bytes_max: usize,
) -> Result<()> {
    let (config, data) = (progress_config(&[]), facts());
    let step = trainer.updates();
    let rows = step * trainer.options().batch as u64;
    let progress = Progress { step, rows, data: &data, config: &config };
    let text = HfConfig::of(&tiny(), Some("bytes"), Some(256)).text();
    let beside = [(checkpoint::CONFIG.to_owned(), text.into_bytes())];
    let saving = Saving { run, keep, file_bytes_max, beside: &beside, disk };
    checkpoint::save_step(trainer, &progress, &saving)?;
    Ok(())
}

/// Trains for some steps and saves; what it then holds, and what the next step is.
pub fn saved_run(
    run: &Path,
    ranks: usize,
    hops: Hops,
    spec: &Gpt2,
    options: &TrainOptions,
    steps: u64,
) -> (Snapshot, StepReport) {
    let options = hops.with(options);
    let tokens = Tokens { vocab_size: spec.vocab_size, seq: options.seq };
    let batch = options.batch as u64;
    let results = on_ranks(ranks, hops.mode, |comm, dev| {
        let mut trainer = Trainer::new(dev, comm, gpt2(spec), options.clone())?;
        for step in 0..steps {
            trainer.step(&tokens, step * batch, false)?;
        }
        save(&trainer, run, &Disk::new(), 3)?;
        let held = snapshot(&trainer);
        Ok((held, trainer.step(&tokens, steps * batch, false)?))
    });
    let next = results[0].1;
    (Snapshot::assemble(results.into_iter().map(|(held, _)| held).collect()), next)
}

/// Trains on rotated shards and saves in files of a size; what it holds.
pub fn saved_in_files(
    run: &Path,
    ranks: usize,
    spec: &Gpt2,
    steps: u64,
    file_bytes_max: usize,
) -> Snapshot {
    let options = options();
    let tokens = Tokens { vocab_size: spec.vocab_size, seq: options.seq };
    let results = on_ranks(ranks, super::HAND_OVER.mode, |comm, dev| {
        let mut trainer = Trainer::new(dev, comm, gpt2(spec), options.clone())?;
        for step in 0..steps {
            trainer.step(&tokens, step * options.batch as u64, false)?;
        }
        save_in_files(&trainer, run, &Disk::new(), 3, file_bytes_max)?;
        Ok(snapshot(&trainer))
    });
    Snapshot::assemble(results)
}

/// Goes on from the newest checkpoint of a run for some steps, and saves. What was loaded, and the
/// steps.
pub fn goes_on(
    run: &Path,
    ranks: usize,
    hops: Hops,
    spec: &Gpt2,
    options: &TrainOptions,
    steps: u64,
) -> (Snapshot, Vec<StepReport>) {
    let options = hops.with(options);
    let tokens = Tokens { vocab_size: spec.vocab_size, seq: options.seq };
    let mut results = on_ranks(ranks, hops.mode, |comm, dev| {
        let mut trainer = Trainer::new(dev, comm, gpt2(spec), options.clone())?;
        let checkpoint = Checkpoint::find(run)?;
        checkpoint::restore(&mut trainer, &checkpoint)?;
        let held = snapshot(&trainer);
        let rows = checkpoint.state().rows;
        let batch = options.batch as u64;
        let reports = (0..steps).map(|s| trainer.step(&tokens, rows + s * batch, false));
        let reports = reports.collect::<Result<Vec<_>>>()?;
        // More than one step is a run that goes on; one is a look at what it would do.
        if steps > 1 {
            trainer.comm().barrier()?;
            save(&trainer, run, &Disk::new(), 3)?;
        }
        Ok((held, reports))
    });
    let reports = results[0].1.clone();
    (Snapshot::assemble(results.drain(..).map(|(held, _)| held).collect()), reports)
}
