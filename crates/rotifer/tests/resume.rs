//! A run that goes on from a checkpoint is the run that was never interrupted, at any number of
//! ranks and under any strategy.

#![allow(missing_docs, reason = "test names are claims")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Mutex;

use common::saves::{Snapshot, assert_bits, goes_on, progress_config, saved_run, snapshot};
use common::{DDP, FSDP, FSDP_KEPT, HAND_OVER, Hops, IN_PLACE, OVERLAPPED, TP, ZERO1};
use common::{Tokens, on_ranks, options, tiny};
use rotifer::checkpoint::{self, Checkpoint, DataFacts};
use rotifer::data::Order;
use rotifer::models::{Gpt2, gpt2};
use rotifer::optim::Optimizer;
use rotifer::train::{Source, StepReport, TrainOptions, Trainer};
use tempfile::tempdir;

/// With dropout, whose masks must go on as well.
fn spec(tied: bool) -> Gpt2 {
    Gpt2 { dropout: 0.1, tied, ..tiny() }
}

#[test]
fn what_4_ranks_save_any_number_goes_on_with() {
    for tied in [true, false] {
        let folder = tempdir().expect("a temporary folder");
        let spec = spec(tied);
        let (saved, next) = saved_run(folder.path(), 4, HAND_OVER, &spec, &options(), 3);
        let others = [
            (1, HAND_OVER),
            (2, OVERLAPPED),
            (3, IN_PLACE),
            (4, HAND_OVER),
            (7, HAND_OVER),
            (2, DDP),
            (3, ZERO1),
            (4, FSDP),
            (3, FSDP_KEPT),
            (7, DDP),
            (5, TP),
        ];
        for (ranks, hops) in others {
            let what = format!("{ranks} ranks, {hops:?}, tied {tied}");
            let (loaded, reports) = goes_on(folder.path(), ranks, hops, &spec, &options(), 1);
            assert_bits(&what, &loaded, &saved);
            let (got, want) = (reports[0], next);
            if (ranks, hops) == (4, HAND_OVER) {
                assert_eq!(got, want, "{what}");
            }
            // As `assert_same_run`: sums over ranks in another order.
            let error = (got.loss - want.loss).abs() / want.loss;
            assert!(error <= 2e-6, "{what}: loss {} instead of {}", got.loss, want.loss);
            let error = (got.grad_norm - want.grad_norm).abs() / want.grad_norm;
            assert!(error <= 1e-5, "{what}: norm {} not {}", got.grad_norm, want.grad_norm);
            assert_eq!((got.step, got.lr, got.targets), (want.step, want.lr, want.targets));
        }
    }
}

/// What `steps` steps of a fresh run give.
fn unbroken(
    ranks: usize,
    hops: Hops,
    spec: &Gpt2,
    options: &TrainOptions,
    steps: u64,
) -> (Vec<StepReport>, Snapshot) {
    let options = hops.with(options);
    let tokens = Tokens { vocab_size: spec.vocab_size, seq: options.seq };
    let mut results = on_ranks(ranks, hops.mode, |comm, dev| {
        let mut trainer = Trainer::new(dev, comm, gpt2(spec), options.clone())?;
        let batch = options.batch as u64;
        let reports = (0..steps).map(|step| trainer.step(&tokens, step * batch, false));
        let reports = reports.collect::<rotifer::Result<Vec<_>>>()?;
        Ok((reports, snapshot(&trainer)))
    });
    let reports = results[0].0.clone();
    (reports, Snapshot::assemble(results.drain(..).map(|(_, parts)| parts).collect()))
}

fn check_bit_equal(ranks: usize, hops: Hops, options: &TrainOptions) {
    let what = format!("{ranks} ranks, {hops:?}, {:?}", options.optimizer);
    let (spec, folder) = (spec(true), tempdir().expect("a temporary folder"));
    let (reports, end) = unbroken(ranks, hops, &spec, options, 7);
    saved_run(folder.path(), ranks, hops, &spec, options, 3);
    let (_, resumed) = goes_on(folder.path(), ranks, hops, &spec, options, 2);
    assert_eq!(resumed, reports[3..5], "{what}");
    // And once more, from what a resumed run saved.
    let checkpoint = Checkpoint::find(folder.path()).expect("a checkpoint");
    assert_eq!((checkpoint.state().step, checkpoint.state().rows), (5, 35), "{what}");
    let (_, resumed) = goes_on(folder.path(), ranks, hops, &spec, options, 2);
    assert_eq!(resumed, reports[5..], "{what}");
    let (loaded, _) = goes_on(folder.path(), ranks, hops, &spec, options, 0);
    assert_bits(&what, &loaded, &end);
}

#[test]
fn a_resumed_run_is_bit_equal_1_to_4_ranks() {
    for ranks in [1, 2, 3, 4] {
        for hops in [HAND_OVER, OVERLAPPED, DDP, ZERO1, FSDP] {
            check_bit_equal(ranks, hops, &options());
        }
    }
    check_bit_equal(5, TP, &options());
}

#[test]
fn sgd_with_and_without_momentum_goes_on() {
    for momentum in [0.9, 0.0] {
        let optimizer = Optimizer::Sgd { momentum, weight_decay: 0.01 };
        check_bit_equal(3, HAND_OVER, &TrainOptions { optimizer, ..options() });
    }
}

#[test]
fn accumulation_may_change_within_a_run() {
    let (spec, folder) = (spec(true), tempdir().expect("a temporary folder"));
    let (saved, next) = saved_run(folder.path(), 2, HAND_OVER, &spec, &options(), 3);
    let options = TrainOptions { accumulation: 3, ..options() };
    let (loaded, reports) = goes_on(folder.path(), 2, HAND_OVER, &spec, &options, 1);
    assert_bits("accumulation 3", &loaded, &saved);
    assert!((reports[0].loss - next.loss).abs() <= 2e-6 * next.loss);
}

/// Samples in an order, noting which are asked for.
struct Noted<'a> {
    order: Order,
    tokens: Tokens,
    seen: &'a Mutex<Vec<(u64, u64)>>,
}

impl Source for Noted<'_> {
    fn num_targets(&self, row: u64) -> usize {
        self.tokens.num_targets(row)
    }

    fn fill(&self, row: u64, x: &mut [i32], y: &mut [i32], documents: Option<&mut [i32]>) {
        self.seen.lock().expect("no rank panics").push((row, self.order.sample(row)));
        self.tokens.fill(row, x, y, documents);
    }
}

#[test]
fn the_order_of_samples_survives_three_interruptions_and_other_ranks() {
    let (spec, options) = (spec(true), options());
    let (folder, seen) = (tempdir().expect("a temporary folder"), Mutex::new(Vec::new()));
    // Fewer windows than rows: over four epochs.
    let order = Order::new(20, options.seed, true);
    for (run, ranks) in [4, 2, 3, 1].into_iter().enumerate() {
        on_ranks(ranks, HAND_OVER.mode, |comm, dev| {
            let mut trainer = Trainer::new(dev, comm, gpt2(&spec), options.clone())?;
            let mut rows = 0;
            if run > 0 {
                let checkpoint = Checkpoint::find(folder.path())?;
                checkpoint::restore(&mut trainer, &checkpoint)?;
                rows = checkpoint.state().rows;
            }
            let tokens = Tokens { vocab_size: spec.vocab_size, seq: options.seq };
            let noted = Noted { order, tokens, seen: &seen };
            for _ in 0..3 {
                trainer.step(&noted, rows, false)?;
                rows += options.batch as u64;
            }
            common::saves::save(&trainer, folder.path(), &checkpoint::Disk::new(), 3)
        });
    }
    let mut seen = seen.into_inner().expect("no rank panics");
    seen.sort_unstable();
    let wanted: Vec<(u64, u64)> =
        (0..4 * 3 * options.batch as u64).map(|row| (row, order.sample(row))).collect();
    assert_eq!(seen, wanted, "every row once, each the sample of the unbroken run");
}

#[test]
fn files_above_the_limit_are_several_with_an_index() {
    let (spec, folder) = (spec(false), tempdir().expect("a temporary folder"));
    let run = folder.path();
    let saved = common::saves::saved_in_files(run, 3, &spec, 3, 30_000);
    let checkpoint = Checkpoint::find(run).expect("a checkpoint");
    let files = &checkpoint.state().files;
    for name in ["model.safetensors.index.json", "optimizer.safetensors.index.json"] {
        let text = fs::read(checkpoint.folder().join(name)).expect("an index");
        let index: BTreeMap<String, serde_json::Value> =
            serde_json::from_slice(&text).expect("JSON");
        let map = index["weight_map"].as_object().expect("a map");
        assert!(map.len() > 20 && index["metadata"]["total_size"].is_u64(), "{name}");
        assert!(map.values().all(|file| files.contains_key(file.as_str().expect("a name"))));
    }
    let parts = files.iter().filter(|(name, _)| name.starts_with("model-"));
    let (count, largest) = (parts.clone().count(), parts.map(|(_, bytes)| *bytes).max());
    // The head alone is 257 x 40 x 4 bytes; others share files.
    assert!(count > 4 && largest < Some(42_000), "{count} files, the largest {largest:?}");
    for (ranks, hops) in [(1, HAND_OVER), (4, FSDP)] {
        let (loaded, _) = goes_on(run, ranks, hops, &spec, &options(), 0);
        assert_bits("several files", &loaded, &saved);
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let name = |entry: std::io::Result<fs::DirEntry>| {
        entry.expect("an entry").file_name().into_string().expect("text")
    };
    let mut names: Vec<String> = entries.map(name).collect();
    names.sort();
    names
}

#[test]
fn the_last_checkpoints_are_kept() {
    let (spec, folder) = (spec(true), tempdir().expect("a temporary folder"));
    saved_run(folder.path(), 2, HAND_OVER, &spec, &options(), 1);
    for _ in 0..4 {
        goes_on(folder.path(), 2, HAND_OVER, &spec, &options(), 2);
    }
    let checkpoints = folder.path().join(checkpoint::CHECKPOINTS);
    let wanted = ["latest", "step-000005", "step-000007", "step-000009"];
    assert_eq!(names(&checkpoints), wanted);
    assert_eq!(fs::read_to_string(checkpoints.join("latest")).expect("text"), "step-000009\n");
    let newest = ["config.json", "model.safetensors", "optimizer.safetensors", "state.json"];
    assert_eq!(names(&checkpoints.join("step-000009")), newest);
    // An older one is the newest again once it is gone on from, and what followed is replaced.
    let old = Checkpoint::find(&checkpoints.join("step-000005")).expect("a checkpoint");
    old.make_latest().expect("a folder that can be written");
    assert_eq!(old.run(), Some(folder.path()));
    goes_on(folder.path(), 3, HAND_OVER, &spec, &options(), 2);
    let found = Checkpoint::find(folder.path()).expect("a checkpoint");
    assert_eq!((found.state().step, found.state().saved_by.ranks), (7, 3));
    fs::remove_dir_all(found.folder()).expect("a folder that can be removed");
    let message = Checkpoint::find(folder.path()).expect_err("it is gone").to_string();
    assert!(message.contains("names step-000007, which is not there"), "{message}");
    assert!(message.contains("step-000005, step-000009"), "{message}");
}

#[test]
fn a_config_of_another_run_is_refused_by_key() {
    let (spec, folder) = (spec(true), tempdir().expect("a temporary folder"));
    saved_run(folder.path(), 1, HAND_OVER, &spec, &options(), 1);
    let checkpoint = Checkpoint::find(folder.path()).expect("a checkpoint");
    let data = common::saves::facts();
    let differs = |sets: &[&str], data: &DataFacts| {
        let config = progress_config(sets);
        checkpoint.require_same_run(&config, data).err().map(|e| e.to_string())
    };
    for free in [
        "ranks.count=3",
        "ranks.threads=2",
        "ranks.strategy=ddp",
        "train.steps=1000",
        "train.accumulation=2",
        "train.eval_batches=3",
        "train.log_every=10",
        "train.out=elsewhere",
        "model.mlp_hidden=recomputed",
        "model.logits=kept",
        "data.train=moved.txt",
        "checkpoint.every=7",
        "sample.prompt=The",
    ] {
        assert_eq!(differs(&[free], &data), None, "{free}");
    }
    for (set, says) in [
        ("model.width=80", "model.width is 80, but"),
        ("model.layers=3", "model.layers is 3, but"),
        ("model.tied=false", "model.tied is false, but"),
        ("model.dropout=0.5", "model.dropout is 0.5, but"),
        ("data.seq=8", "data.seq is 8, but"),
        ("data.shuffle=false", "data.shuffle is false, but"),
        ("train.seed=9", "train.seed is 9, but"),
        ("train.batch=9", "train.batch is 9, but"),
        ("train.clip_norm=3.0", "train.clip_norm is 3.0, but"),
        ("optimizer.lr=0.5", "optimizer.lr is 0.5, but"),
        ("optimizer.kind=sgd", "optimizer.kind is \"sgd\", but"),
        ("schedule.kind=cosine", "schedule.kind is \"cosine\", but"),
    ] {
        let message = differs(&[set], &data).unwrap_or_else(|| panic!("{set} is not refused"));
        assert!(message.contains(says), "{set}: {message}");
    }
    let other = DataFacts { tokens: data.tokens + 1, ..data.clone() };
    let message = differs(&[], &other).expect("other data");
    assert!(message.contains("data.train is 1001 tokens"), "{message}");
    // What the optimiser keeps is compared with the trainer's as well.
    let sgd = Optimizer::Sgd { momentum: 0.9, weight_decay: 0.0 };
    let options = TrainOptions { optimizer: sgd, ..options() };
    let failure = common::try_on_ranks(1, HAND_OVER.mode, |comm, dev| {
        let mut trainer = Trainer::new(dev, comm, gpt2(&spec), options.clone())?;
        checkpoint::restore(&mut trainer, &checkpoint)
    });
    let message = failure.expect_err("another optimiser").to_string();
    assert!(message.contains("this run's optimiser keeps [\"momentum_buffer\"]"), "{message}");
}
