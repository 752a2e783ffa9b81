//! `rotifer train`: what it writes and prints, and how it ends.

#![allow(missing_docs, reason = "test names are claims")]

mod common;

use std::collections::BTreeMap;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{Place, Ran};
use serde_json::Value;

fn metrics(place: &Place, folder: &str) -> Vec<Value> {
    let text = place.read(&format!("{folder}/metrics.jsonl"));
    assert!(text.ends_with('\n'));
    let line = |line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"));
    text.lines().map(line).collect()
}

/// Names and shapes of the tensors in a folder, and the header's metadata.
fn header(place: &Place, folder: &str) -> (BTreeMap<String, Vec<u64>>, Value) {
    let bytes = place.bytes(&format!("{folder}/model.safetensors"));
    let (length, rest) = bytes.split_first_chunk::<8>().expect("a header");
    let json = &rest[..u64::from_le_bytes(*length) as usize];
    let mut header: BTreeMap<String, Value> = serde_json::from_slice(json).expect("JSON");
    let metadata = header.remove("__metadata__").expect("metadata");
    let shape = |value: &Value| {
        assert_eq!(value["dtype"], "F32");
        value["shape"].as_array().expect("a shape").iter().filter_map(Value::as_u64).collect()
    };
    (header.iter().map(|(name, value)| (name.clone(), shape(value))).collect(), metadata)
}

#[test]
fn train_writes_metrics_2_ranks() {
    let place = Place::new();
    place.works(&["train", "tiny.toml", "--set", "train.steps=5"]);
    let (evals, steps): (Vec<_>, Vec<_>) =
        metrics(&place, "runs/tiny").into_iter().partition(|line| line.get("eval_loss").is_some());
    let number = |line: &Value, key: &str| {
        line[key].as_f64().unwrap_or_else(|| panic!("{key} of {line} is a number"))
    };
    assert_eq!(steps.len(), 5);
    for (i, line) in steps.iter().enumerate() {
        assert_eq!(line["step"], i + 1);
        assert_eq!(number(line, "lr"), 1e-2);
        for key in ["loss", "grad_norm", "tokens_per_sec", "peak_bytes"] {
            assert!(number(line, key) > 0.0, "{key} of {line}");
        }
    }
    assert!(number(&steps[4], "loss") < number(&steps[0], "loss"));
    // After steps 2 and 4, and at the end.
    let at: Vec<_> = evals.iter().map(|line| number(line, "step")).collect();
    assert_eq!(at, [2.0, 4.0, 5.0]);
    assert!(number(&evals[2], "eval_loss") < number(&evals[0], "eval_loss"));
}

#[test]
fn train_writes_what_hugging_face_reads() {
    let place = Place::new();
    place.works(&["train", "tiny.toml"]);
    let (shapes, metadata) = header(&place, "runs/tiny");
    assert_eq!(metadata["format"], "pt");
    let block: [(&str, &[u64]); 12] = [
        ("ln_1.weight", &[20]),
        ("ln_1.bias", &[20]),
        ("attn.c_attn.weight", &[20, 60]),
        ("attn.c_attn.bias", &[60]),
        ("attn.c_proj.weight", &[20, 20]),
        ("attn.c_proj.bias", &[20]),
        ("ln_2.weight", &[20]),
        ("ln_2.bias", &[20]),
        ("mlp.c_fc.weight", &[20, 80]),
        ("mlp.c_fc.bias", &[80]),
        ("mlp.c_proj.weight", &[80, 20]),
        ("mlp.c_proj.bias", &[20]),
    ];
    let around: [(&str, &[u64]); 4] = [
        ("wte.weight", &[257, 20]),
        ("wpe.weight", &[16, 20]),
        ("ln_f.weight", &[20]),
        ("ln_f.bias", &[20]),
    ];
    let block = block.iter().map(|(name, shape)| (format!("h.0.{name}"), shape.to_vec()));
    let around = around.iter().map(|(name, shape)| ((*name).to_owned(), shape.to_vec()));
    let wanted: BTreeMap<_, _> =
        block.chain(around).map(|(name, shape)| (format!("transformer.{name}"), shape)).collect();
    assert_eq!(shapes, wanted);

    let config: Value = serde_json::from_str(&place.read("runs/tiny/config.json")).expect("JSON");
    assert_eq!(config["architectures"][0], "GPT2LMHeadModel");
    let sizes = [("n_embd", 20), ("n_layer", 1), ("n_head", 5), ("n_positions", 16)];
    for (key, value) in sizes.into_iter().chain([("vocab_size", 257), ("n_inner", 80)]) {
        assert_eq!(config[key], value, "{key}");
    }
    assert_eq!(config["tie_word_embeddings"], true);
}

#[test]
fn an_untied_head_has_a_table_of_its_own() {
    let place = Place::new();
    place.works(&["train", "tiny.toml", "--set", "model.tied=false"]);
    let (shapes, _) = header(&place, "runs/tiny");
    assert_eq!(shapes["lm_head.weight"], [257, 20]);
    assert_eq!(shapes["transformer.wte.weight"], [257, 20]);
}

#[test]
fn runs_without_a_folder_are_numbered() {
    let place = Place::new();
    let weights = |printed: String| {
        printed.lines().last().expect("a last line").trim_start_matches("weights: ").to_owned()
    };
    for wanted in ["runs/tiny", "runs/tiny-2", "runs/tiny-3"] {
        assert_eq!(weights(place.works(&["train", "tiny.toml"])), wanted);
        assert_eq!(metrics(&place, wanted).len(), 6);
    }
    let chosen = ["train", "tiny.toml", "--set", "train.out=some/where"];
    assert_eq!(weights(place.works(&chosen)), "some/where");
    let files = ["config.json", "metrics.jsonl", "model.safetensors"];
    assert!(files.iter().all(|file| place.path("some/where").join(file).exists()));
}

/// Numbers of a table's row.
fn row<'a>(printed: &'a str, name: &str) -> Vec<&'a str> {
    let mut rows = printed.lines().filter_map(|line| line.strip_prefix(name));
    let row = rows.next().unwrap_or_else(|| panic!("no row {name} in {printed}"));
    row.split_whitespace().collect()
}

#[test]
fn a_log_has_plain_lines_and_a_closing_table() {
    let place = Place::new();
    let sample = ["--set", "sample.prompt=The", "--set", "sample.tokens=3", "--profile"];
    let printed = place.works(&[&["train", "tiny.toml", "--ranks", "3"], &sample[..]].concat());
    assert!(!printed.contains(['\x1b', '\r']), "{printed:?}");
    for part in ["on 3 rank(s) x 1 thread(s)", "step 1/4  loss ", "step 4/4  loss ", "sample:\nThe"]
    {
        assert!(printed.contains(part), "no {part:?} in {printed}");
    }
    assert!(printed.contains("step 2: held-out loss ") && printed.contains("(perplexity "));
    assert!(printed.contains("one rank / 3"));
    let purposes = ["weights", "gradients", "optimizer", "activations", "travel", "scratch"];
    let bytes = |name| row(&printed, name)[0].parse::<u64>().expect("a number of bytes");
    let total = bytes("in all");
    assert_eq!(purposes.map(bytes).iter().sum::<u64>(), total);
    assert_eq!(metrics(&place, "runs/tiny")[0]["peak_bytes"], total);
    // Weights and all that goes with them are a third, and the replicated norms and biases.
    for name in ["weights", "gradients", "optimizer"] {
        let ratio: f64 = row(&printed, name)[2].parse().expect("a ratio");
        assert!((1.0..1.1).contains(&ratio), "{name}: {ratio}");
    }
    // The parts of a step's time: copies between ranks are both waiting and copying.
    assert!(printed.contains("(rank 0, 4 steps)"), "--profile prints the time by kernel");
    for kernel in ["matmul", "attention", "waiting", "other"] {
        let percent: f64 = row(&printed, kernel)[1].parse().expect("a part");
        assert!((0.0..=100.5).contains(&percent), "{kernel}: {percent} % of all steps");
    }
}

/// Starts a run that would take hours and waits until it trains.
fn endless(place: &Place) -> Child {
    let sets = ["--set", "train.steps=100000000", "--set", "train.eval_every=0"];
    let args = [&["train", "tiny.toml"], &sets[..]].concat();
    let child = place.command(&args).spawn().expect("the command starts");
    let begin = Instant::now();
    let file = place.path("runs/tiny/metrics.jsonl");
    while std::fs::read_to_string(&file).map_or(0, |text| text.lines().count()) < 3 {
        assert!(begin.elapsed() < Duration::from_secs(20), "the run does not begin");
        sleep(Duration::from_millis(5));
    }
    child
}

/// Sends `signal` to a run, which must end soon, with its weights saved.
fn ends_in_order(signal: &str) {
    let place = Place::new();
    let child = endless(&place);
    let kill = format!("kill -{signal} {}", child.id());
    let sent = Command::new("sh").args(["-c", &kill]).status().expect("a shell");
    assert!(sent.success(), "{kill}");
    // Bounded: the harness would wait for ever for a run that goes on.
    let watchdog = format!("sleep 20; kill -KILL {}", child.id());
    let mut watchdog = Command::new("sh").args(["-c", &watchdog]).spawn().expect("a shell");
    let ran: Ran = child.wait_with_output().expect("an end").into();
    let _ = watchdog.kill();
    let _ = watchdog.wait();
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.stderr.contains("ending after this step"), "{ran:?}");
    let lines = metrics(&place, "runs/tiny");
    let steps = lines.iter().filter(|line| line.get("loss").is_some()).count();
    assert!(ran.stdout.contains(&format!("stopped after step {steps} as asked")), "{ran:?}");
    assert!(lines.last().is_some_and(|line| line["step"] == steps), "evaluated at the end");
    assert!(!place.path("runs/tiny/model.safetensors.partial").exists());
    place.works(&["generate", "runs/tiny", "--prompt", "The", "--tokens", "3", "--ranks", "3"]);
}

#[test]
fn ctrl_c_ends_after_the_step_and_saves() {
    ends_in_order("INT");
}

#[test]
fn sigterm_ends_after_the_step_and_saves() {
    ends_in_order("TERM");
}
