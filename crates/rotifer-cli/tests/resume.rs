//! `rotifer train --resume`: interrupted by Ctrl-C, SIGTERM or SIGKILL, a run ends as if it had not
//! been.

#![allow(missing_docs, reason = "test names are claims")]

mod common;

use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{Place, Ran};
use serde_json::Value;

/// What a run's metrics say of its numbers: step, loss, norm and rate, or step and held-out loss.
fn curve(place: &Place, folder: &str) -> Vec<[f64; 4]> {
    let text = place.read(&format!("{folder}/metrics.jsonl"));
    let number = |line: &Value, key: &str| line[key].as_f64().unwrap_or(-1.0);
    let line = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"));
        let loss = if line.get("loss").is_some() { "loss" } else { "eval_loss" };
        ["step", loss, "grad_norm", "lr"].map(|key| number(&line, key))
    };
    text.lines().map(line).collect()
}

/// Long enough to be interrupted, with all that must go on: dropout, a schedule, clipping.
const LONG: [&str; 14] = [
    "--set",
    "train.steps=60",
    "--set",
    "train.eval_every=20",
    "--set",
    "model.dropout=0.1",
    "--set",
    "schedule.kind=cosine",
    "--set",
    "train.clip_norm=0.5",
    "--set",
    "checkpoint.every=5",
    "--set",
    "checkpoint.keep=2",
];

fn long<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["train", "tiny.toml"], &LONG[..], more].concat()
}

/// Waits until a run has written some lines.
fn wait_for_lines(place: &Place, folder: &str, lines: usize) {
    let begin = Instant::now();
    let file = place.path(folder).join("metrics.jsonl");
    while std::fs::read_to_string(&file).map_or(0, |text| text.lines().count()) < lines {
        assert!(begin.elapsed() < Duration::from_secs(20), "the run does not get to {lines} lines");
        sleep(Duration::from_millis(1));
    }
}

fn signal(child: &Child, name: &str) {
    let kill = format!("kill -{name} {}", child.id());
    // A run may have ended by itself.
    let _ = Command::new("sh").args(["-c", &kill]).output().expect("a shell");
}

/// Starts a run, sends it a signal when it has written some lines, and waits for its end.
fn interrupted(place: &Place, args: &[&str], folder: &str, lines: usize, name: &str) -> Ran {
    let child = place.command(args).spawn().expect("the command starts");
    wait_for_lines(place, folder, lines);
    signal(&child, name);
    child.wait_with_output().expect("an end").into()
}

#[test]
fn interrupted_by_ctrl_c_and_sigterm_the_curve_is_the_unbroken_one_bit_for_bit() {
    let place = Place::new();
    place.works(&long(&["--set", "train.out=whole"]));
    let whole = curve(&place, "whole");
    assert_eq!(whole.len(), 63, "60 steps and 3 evaluations");
    let out = ["--set", "train.out=broken"];
    let again = [&out[..], &["--resume", "broken"]].concat();
    let first = interrupted(&place, &long(&out), "broken", 12, "INT");
    assert_eq!(first.code, Some(0), "{first:?}");
    let mut resumed = 0;
    for (lines, name) in [(25, "TERM"), (40, "INT")] {
        if curve(&place, "broken").len() < lines {
            let ran = interrupted(&place, &long(&again), "broken", lines, name);
            assert_eq!(ran.code, Some(0), "{ran:?}");
            resumed += 1;
        }
    }
    assert!(resumed > 0, "at least one was in time");
    if curve(&place, "broken") != whole {
        place.works(&long(&again));
    }
    assert_eq!(curve(&place, "broken"), whole);
    let weights = |folder: &str| place.bytes(&format!("{folder}/model.safetensors"));
    assert!(weights("broken") == weights("whole"), "bit-equal weights");
    let states = |folder: &str| {
        place.bytes(&format!("{folder}/checkpoints/step-000060/optimizer.safetensors"))
    };
    assert!(states("broken") == states("whole"), "bit-equal moments");
}

#[test]
fn killed_at_any_moment_the_run_goes_on_from_its_last_checkpoint() {
    let place = Place::new();
    place.works(&long(&["--set", "train.out=whole", "--ranks", "3"]));
    let whole = curve(&place, "whole");
    let out = ["--set", "train.out=killed", "--set", "checkpoint.every=1", "--ranks", "3"];
    let again = [&out[..], &["--resume", "killed"]].concat();
    let first = interrupted(&place, &long(&out), "killed", 4, "KILL");
    assert_eq!(first.code, None, "killed: {first:?}");
    let mut kills = 1;
    for more in [3, 5, 2, 7, 4, 6] {
        // What the killed run logged after its last checkpoint is not counted twice.
        let lines = curve(&place, "killed").len();
        if lines + more < 50 {
            // Nothing to wait for once it has all lines, so that it is killed in the midst of it.
            let ran = interrupted(&place, &long(&again), "killed", lines + more, "KILL");
            kills += usize::from(ran.code.is_none());
        }
    }
    assert!(kills > 3, "{kills} kills");
    place.works(&long(&again));
    assert_eq!(curve(&place, "killed"), whole);
}

#[test]
fn another_number_of_ranks_and_another_strategy_go_on() {
    let place = Place::new();
    let steps = |n: &'static str| ["--set", n];
    place.works(&["train", "tiny.toml", "--set", "train.steps=9", "--set", "train.out=whole"]);
    let first = [&["train", "tiny.toml", "--ranks", "4"], &steps("train.steps=3")[..]].concat();
    place.works(&first);
    for (n, ranks, strategy) in [
        ("train.steps=5", "3", "ranks.strategy=fsdp"),
        ("train.steps=7", "1", "ranks.strategy=single"),
        ("train.steps=9", "2", "ranks.strategy=ddp"),
    ] {
        let args = ["train", "tiny.toml", "--ranks", ranks, "--resume", "runs/tiny"];
        place.works(&[&args[..], &steps(n), &steps(strategy)].concat());
    }
    let only_steps = |folder: &str| -> Vec<[f64; 4]> {
        curve(&place, folder).into_iter().filter(|line| line[3] > 0.0).collect()
    };
    let (whole, parts) = (only_steps("whole"), only_steps("runs/tiny"));
    assert_eq!((whole.len(), parts.len()), (9, 9));
    for (got, want) in parts.iter().zip(&whole) {
        assert_eq!((got[0], got[3]), (want[0], want[3]));
        // Sums over ranks in another order, through nine steps.
        assert!((got[1] - want[1]).abs() < 1e-4 * want[1], "{got:?} instead of {want:?}");
    }
}

#[test]
fn a_checkpoint_is_a_model_and_branches_into_another_folder() {
    let place = Place::new();
    place.works(&["train", "tiny.toml", "--set", "checkpoint.every=2"]);
    let checkpoint = "runs/tiny/checkpoints/step-000002";
    place.works(&["generate", checkpoint, "--prompt", "The", "--tokens", "3"]);
    let branch = ["--resume", checkpoint, "--set", "train.out=branch"];
    place.works(&[&["train", "tiny.toml"], &branch[..]].concat());
    // Steps 3 and 4 and the evaluation at the end.
    assert_eq!(curve(&place, "branch"), curve(&place, "runs/tiny")[3..]);
    assert!(place.path("branch/checkpoints/step-000004/state.json").exists());
    assert_eq!(place.read("runs/tiny/checkpoints/latest"), "step-000004\n");
    // Without a folder of its own it goes on where it was, from where the checkpoint is.
    let lines = curve(&place, "runs/tiny");
    place.works(&["train", "tiny.toml", "--resume", checkpoint]);
    assert_eq!(curve(&place, "runs/tiny"), lines);
    assert!(!place.path("runs/tiny-2").exists());
}

#[test]
fn what_cannot_go_on_is_refused() {
    let place = Place::new();
    place.works(&["train", "tiny.toml"]);
    let resume = |more: &[&'static str]| [&["train", "tiny.toml", "--resume"], more].concat();
    place.refuses(&resume(&["nowhere"]), &["nowhere", "is neither a checkpoint"]);
    place.refuses(&resume(&["runs/tiny"]), &["has 4 steps already", "train.steps is 4"]);
    let longer = ["runs/tiny", "--set", "train.steps=6"];
    let with = |set: &'static str| resume(&[&longer[..], &["--set", set]].concat());
    place.refuses(&with("model.width=40"), &["model.width is 40", "trained with 20"]);
    place.refuses(&with("train.seed=2"), &["train.seed is 2", "trained with 1"]);
    place.refuses(&with("train.batch=8"), &["train.batch is 8", "trained with 6"]);
    place.refuses(&with("data.validation_fraction=0.2"), &["data.train is ", " tokens"]);
    let text = place.read("text.txt");
    place.write("text.txt", text.replace("fox", "cat"));
    place.refuses(&resume(&longer), &["data.train is ", " tokens"]);
    place.write("moved.txt", text);
    place.works(&with("data.train=moved.txt"));
    let file = "runs/tiny/checkpoints/step-000006/optimizer.safetensors";
    let bytes = place.bytes(file);
    place.write(file, &bytes[..bytes.len() / 2]);
    let more = resume(&["runs/tiny", "--set", "train.steps=8", "--set", "data.train=moved.txt"]);
    place.refuses(&more, &["optimizer.safetensors", "was saved with"]);
}
