//! A whole run, stopped after exact steps and resumed.

#![allow(missing_docs, reason = "test names are claims")]

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rotifer::checkpoint::Checkpoint;
use rotifer::config::Config;
use rotifer::session::{self, Observer, RunInfo, StepLine};

/// Asks for an end after step `after`.
struct StopAfter<'a> {
    after: u64,
    stop: &'a AtomicBool,
}

impl Observer for StopAfter<'_> {
    fn started(&self, _: &RunInfo) {}

    fn step(&self, line: &StepLine) {
        // Read before the next step, which is the last one then.
        if line.step + 1 == self.after {
            self.stop.store(true, Ordering::Relaxed);
        }
    }

    fn evaluated(&self, _: u64, _: f64) {}

    fn sample(&self, _: &str) {}
}

fn config(folder: &Path, out: &str, ranks: usize) -> Config {
    let text = format!(
        "
        [model]
        context = 16
        width = 20
        layers = 1
        heads = 5
        dropout = 0.1
        [data]
        train = {data:?}
        validation_fraction = 0.1
        [train]
        steps = 12
        batch = 6
        eval_every = 4
        out = {out:?}
        [optimizer]
        lr = 1e-2
        [ranks]
        count = {ranks}
        [checkpoint]
        every = 3
        ",
        data = folder.join("text.txt"),
        out = folder.join(out),
    );
    Config::parse(&text, Path::new("tiny.toml"), &[]).expect("a valid config")
}

/// Runs to step `after`, from the newest checkpoint if there is one.
fn run(config: &Config, after: u64) -> u64 {
    let stop = AtomicBool::new(false);
    let observer = StopAfter { after, stop: &stop };
    let out = config.train.out.clone().expect("a folder");
    let summary = if out.exists() {
        session::resume(config, &out, 1, &stop, &observer)
    } else {
        session::train(config, 1, &stop, &observer)
    };
    summary.unwrap_or_else(|e| panic!("{e}")).steps
}

/// Lines of the metrics without what depends on the clock.
fn curve(config: &Config) -> Vec<String> {
    let out = config.train.out.as_deref().expect("a folder");
    let text = fs::read_to_string(out.join("metrics.jsonl")).expect("metrics");
    let timeless = |line: &str| {
        let parts = line.split([',', '{', '}']);
        let kept = |part: &&str| !part.contains("_secs") && !part.contains("per_sec");
        parts.filter(kept).collect::<Vec<_>>().join(",")
    };
    text.lines().map(timeless).collect()
}

#[test]
fn stopped_after_any_step_the_run_ends_as_the_unbroken_one_1_to_4_ranks() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let text = "The quick brown fox jumps over the lazy dog.\n".repeat(50);
    fs::write(folder.path().join("text.txt"), text).expect("a file that can be written");
    for ranks in [1, 2, 3, 4] {
        let whole = config(folder.path(), &format!("whole-{ranks}"), ranks);
        assert_eq!(run(&whole, u64::MAX), 12);
        // After a step whose evaluation is due, after one that is saved anyway, and after neither.
        for (i, stops) in
            [vec![4, 8], vec![3, 6, 9], vec![2, 7, 11], vec![5, 8, 10]].into_iter().enumerate()
        {
            let broken = config(folder.path(), &format!("broken-{ranks}-{i}"), ranks);
            for stop in stops.iter().copied() {
                assert_eq!(run(&broken, stop), stop);
                let out = broken.train.out.as_deref().expect("a folder");
                let checkpoint = Checkpoint::find(out).expect("a checkpoint");
                assert_eq!(checkpoint.state().step, stop, "{ranks} ranks, {stops:?}");
            }
            assert_eq!(run(&broken, u64::MAX), 12);
            assert_eq!(curve(&broken), curve(&whole), "{ranks} ranks, {stops:?}");
        }
    }
}
