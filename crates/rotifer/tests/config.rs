//! What a config accepts, and what its errors say.

use std::path::{Path, PathBuf};

use rotifer::config::{
    Config, Error, Hop, Logits, OptimizerKind, Place, ScheduleKind, Strategy, Tokenizer,
};
use rotifer::optim::Shape;

/// The least that a config must say; line numbers in this file's tests count its lines.
const LEAST: &str = "\
[model]
context = 64
width = 48
layers = 2
heads = 3
[data]
train = \"corpus\"
[train]
steps = 100
batch = 8
[optimizer]
lr = 1e-3
";

fn parse(text: &str, overrides: &[&str]) -> Result<Config, Error> {
    let overrides: Vec<String> = overrides.iter().map(|&s| s.to_owned()).collect();
    Config::parse(text, Path::new("some/tiny.toml"), &overrides)
}

fn least(overrides: &[&str]) -> Config {
    parse(LEAST, overrides).unwrap_or_else(|e| panic!("{e}"))
}

fn message(text: &str, overrides: &[&str]) -> String {
    match parse(text, overrides) {
        Ok(_) => panic!("accepted: {text} {overrides:?}"),
        Err(e) => e.to_string(),
    }
}

/// Each of `parts` is in the message that the overrides lead to.
fn refused(overrides: &[&str], parts: &[&str]) {
    let message = message(LEAST, overrides);
    for part in parts {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
}

#[test]
fn defaults_are_as_documented() {
    let c = least(&[]);
    assert_eq!((c.seq(), c.vocab_size(), c.mlp_width()), (64, 257, 192));
    assert!(c.model.tied && c.data.shuffle && c.ranks.overlap && !c.data.document_mask);
    assert_eq!((c.model.dropout, c.model.init_std), (0.0, 0.02));
    assert_eq!((c.model.logits, c.data.tokenizer), (Logits::Recomputed, Tokenizer::Bytes));
    assert_eq!(c.data.train, ["corpus"]);
    assert!(c.data.validation.is_empty());
    assert_eq!((c.data.text_field.as_str(), c.data.validation_fraction), ("text", 0.0));
    assert_eq!((c.train.accumulation, c.train.seed, c.train.clip_norm), (1, 1, None));
    assert_eq!((c.train.eval_every, c.train.eval_batches, c.train.log_every), (0, 0, 1));
    assert_eq!((c.name(), c.train.out.as_ref()), ("tiny", None));
    assert_eq!(c.optimizer.kind, OptimizerKind::AdamW);
    assert_eq!((c.optimizer.beta1, c.optimizer.beta2, c.optimizer.eps), (0.9, 0.95, 1e-8));
    assert_eq!((c.optimizer.weight_decay, c.optimizer.momentum), (0.1, 0.9));
    assert_eq!((c.schedule.kind, c.schedule.warmup_steps), (ScheduleKind::Constant, 0));
    assert_eq!((c.ranks.count, c.ranks.threads, c.ranks.strategy), (1, None, Strategy::Rtp));
    assert_eq!((c.ranks.hop, c.ranks.travel_bytes_max), (Hop::HandOver, 4 << 20));
    assert_eq!((c.ranks.deadline_secs, c.sample), (60, None));
}

#[test]
fn overrides_take_toml_values_and_bare_strings_and_the_last_wins() {
    let c = least(&[
        "train.steps=5",
        "train.steps = 7",
        "train.out=runs/a b",
        "ranks.count=4",
        "ranks.hop=copy",
        "ranks.overlap=false",
        "data.train=[\"a.txt\", \"b/*.txt\"]",
        "optimizer.lr=3e-4",
        "optimizer.kind=\"sgd\"",
        "sample.prompt=Once = upon",
        "sample.top_p=0.9",
    ]);
    assert_eq!((c.train.steps, c.train.out), (7, Some(PathBuf::from("runs/a b"))));
    assert_eq!((c.ranks.count, c.ranks.hop, c.ranks.overlap), (4, Hop::Copy, false));
    assert_eq!(c.data.train, ["a.txt", "b/*.txt"]);
    assert_eq!((c.optimizer.lr, c.optimizer.kind), (3e-4, OptimizerKind::Sgd));
    let sample = c.sample.expect("the overrides make a section");
    assert_eq!((sample.prompt.as_str(), sample.tokens), ("Once = upon", 200));
    assert_eq!((sample.temperature, sample.top_p), (1.0, Some(0.9)));
}

#[test]
fn an_override_may_give_what_the_file_lacks() {
    let text = LEAST.replace("steps = 100\n", "");
    assert_eq!(message(&text, &[]), "some/tiny.toml: train.steps is missing");
    assert_eq!(parse(&text, &["train.steps=3"]).unwrap().train.steps, 3);
    assert_eq!(message("[model]\ncontext = 1\nwidth = 1\nlayers = 1", &[]).lines().count(), 1);
    assert_eq!(message("", &[]), "some/tiny.toml: model is missing");
}

#[test]
fn bytes_are_integers_or_sizes() {
    let bytes =
        |set: &str| least(&[&format!("ranks.travel_bytes_max={set}")]).ranks.travel_bytes_max;
    assert_eq!(bytes("65536"), 65536);
    assert_eq!(bytes("\"512KiB\""), 512 << 10);
    assert_eq!(bytes("1.5 GiB"), 3 << 29);
    assert_eq!(bytes("10MB"), 10_000_000);
    refused(&["ranks.travel_bytes_max=4Mb"], &["\"4Mb\"", "MiB", "--set ranks.travel_bytes_max"]);
    refused(&["ranks.travel_bytes_max=-1"], &["-1", "a number of bytes"]);
    refused(&["ranks.travel_bytes_max=0"], &["ranks.travel_bytes_max is 0", "at least 1"]);
    refused(&["ranks.travel_bytes_max=MiB"], &["MiB"]);
}

#[test]
fn an_unknown_key_names_its_line_and_the_nearest_key() {
    let text = LEAST.replace("steps = 100", "stpes = 100");
    let said = message(&text, &[]);
    assert_eq!(said, "some/tiny.toml:9: there is no train.stpes; did you mean train.steps?");
    match parse(&text, &[]) {
        Err(Error::UnknownKey { place: Place::Line { line, .. }, key, .. }) => {
            assert_eq!((line, key.as_str()), (9, "train.stpes"));
        }
        other => panic!("{other:?}"),
    }
    let section = message(&LEAST.replace("[optimizer]", "[optimiser]"), &[]);
    assert!(section.starts_with("some/tiny.toml:11: there is no section optimiser"), "{section}");
    assert!(section.ends_with("did you mean optimizer?"), "{section}");
    refused(&["train.lr=1"], &["no train.lr", "did you mean optimizer.lr?", "--set train.lr=1"]);
    refused(&["trian.steps=1"], &["did you mean train.steps?"]);
    refused(&["ranks.zzzzzz=1"], &["[ranks] has count, threads"]);
    refused(&["zzzzzz.count=1"], &["the sections are model, data"]);
    refused(&["train.steps.more=1"], &["no train.steps.more"]);
}

#[test]
fn a_bad_override_says_how_to_write_it() {
    for set in ["train.steps", "steps=1", ""] {
        refused(&[set], &["section.key=value"]);
    }
}

#[test]
fn a_bad_value_names_its_line_and_what_is_allowed() {
    let said = message(&LEAST.replace("width = 48", "width = \"wide\""), &[]);
    assert!(said.starts_with("some/tiny.toml:3: model.width: "), "{said}");
    assert!(said.contains("\"wide\"") && said.contains("a whole number of 0 or more"), "{said}");
    refused(&["optimizer.kind=adam"], &["--set optimizer.kind=adam", "`adamw` or `sgd`"]);
    refused(&["schedule.kind=cosin"], &["`constant`, `linear`, `cosine`, `wsd`"]);
    refused(&["train.steps=-5"], &["train.steps", "-5", "a whole number of 0 or more"]);
    refused(&["train.steps=1.5"], &["train.steps", "1.5"]);
    refused(&["model.tied=1"], &["true or false"]);
    refused(&["ranks.threads=0"], &["ranks.threads", "1 or more"]);
    refused(&["data.train=3"], &["a path or a list of paths"]);
    refused(&["data.train=[\"a\", 3]"], &["data.train", "--set data.train"]);
    let not_a_table = message("model = 3", &[]);
    assert!(not_a_table.starts_with("some/tiny.toml:1: model: "), "{not_a_table}");
}

#[test]
fn broken_toml_names_its_line() {
    let said = message("[model]\ncontext = 64\nwidth = = 3\n", &[]);
    assert!(said.starts_with("some/tiny.toml:3: "), "{said}");
    let twice = message(&LEAST.replace("heads = 3", "width = 3"), &[]);
    assert!(twice.starts_with("some/tiny.toml:5: "), "{twice}");
}

#[test]
fn numbers_out_of_range_are_refused_by_name() {
    let counts = "model.vocab_size model.context model.width model.layers model.heads \
                  model.mlp_width data.seq train.steps train.batch train.accumulation \
                  train.log_every ranks.count ranks.deadline_secs schedule.decay_steps";
    for key in counts.split_whitespace() {
        refused(&[&format!("{key}=0")], &[&format!("{key} is 0"), "at least 1"]);
    }
    for (key, value) in [
        ("model.dropout", "1.0"),
        ("model.dropout", "-0.5"),
        ("model.init_std", "0.0"),
        ("data.validation_fraction", "1.0"),
        ("train.clip_norm", "0.0"),
        ("optimizer.lr", "0.0"),
        ("optimizer.lr", "nan"),
        ("optimizer.lr", "inf"),
        ("optimizer.beta1", "1.0"),
        ("optimizer.beta2", "-1.0"),
        ("optimizer.eps", "0.0"),
        ("optimizer.weight_decay", "-1.0"),
        ("optimizer.momentum", "1.0"),
        ("schedule.final_lr_ratio", "1.5"),
    ] {
        refused(&[&format!("{key}={value}")], &[&format!("{key} is "), "it must be"]);
    }
    refused(&["sample.prompt=a", "sample.top_p=0.0"], &["sample.top_p is 0"]);
    refused(&["sample.prompt=a", "sample.temperature=-1.0"], &["sample.temperature is -1"]);
    refused(&["sample.prompt=a", "sample.tokens=0"], &["sample.tokens is 0"]);
    least(&["sample.prompt="]);
    refused(&["data.train=[]"], &["data.train"]);
}

#[test]
fn contradictions_are_refused_with_both_operands() {
    refused(&["model.heads=5"], &["model.heads = 5", "model.width = 48", "45 and 50"]);
    refused(&["data.seq=65"], &["data.seq = 65", "model.context = 64"]);
    refused(&["ranks.count=9"], &["ranks.count = 9", "train.batch = 8"]);
    refused(
        &["ranks.count=4", "train.accumulation=3"],
        &["train.batch = 8", "4 ranks", "at most 2 rows", "train.accumulation = 3"],
    );
    refused(&["ranks.count=2", "ranks.strategy=single"], &["single", "ranks.count = 2"]);
    refused(&["schedule.warmup_steps=101"], &["warmup_steps = 101", "train.steps = 100"]);
    refused(&["schedule.kind=wsd", "schedule.warmup_steps=95"], &["a fall of 10 steps"]);
    refused(&["train.eval_every=10"], &["train.eval_every is 10", "data.validation"]);
    refused(
        &["data.validation=v.txt", "data.validation_fraction=0.1"],
        &["data.validation names files", "0.1"],
    );
}

#[test]
fn nothing_has_to_divide_by_the_ranks() {
    let c = least(&["ranks.count=7", "model.vocab_size=1009", "model.mlp_width=101"]);
    assert_eq!((c.vocab_size(), c.mlp_width()), (1009, 101));
    least(&["ranks.count=1", "ranks.strategy=single", "train.accumulation=8"]);
}

#[test]
fn the_schedule_takes_its_numbers_from_three_sections() {
    let c = least(&["schedule.kind=wsd", "schedule.warmup_steps=10"]);
    let s = c.lr_schedule();
    assert_eq!(s.shape, Shape::WarmupStableDecay { decay_steps: 10 });
    assert_eq!((s.peak, s.warmup_steps, s.steps, s.final_ratio), (1e-3, 10, 100, 0.1));
    assert_eq!((s.lr(0), s.lr(50), s.lr(90)), (1e-4, 1e-3, 1e-3));
    assert_eq!(least(&[]).lr_schedule().lr(99), 1e-3);
}

#[test]
fn load_names_a_file_that_it_cannot_read() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("run.toml");
    let e = Config::load(&path, &[]).expect_err("there is no file");
    assert!(e.to_string().contains("run.toml"), "{e}");
    std::fs::write(&path, LEAST).expect("the folder can be written");
    let config = Config::load(&path, &[]).expect("the least config is complete");
    assert_eq!(config.name(), "run");
    assert!(Config::load(&path, &["train.steps=0".to_owned()]).is_err());
}

#[test]
fn a_link_needs_hops_that_copy() {
    for set in ["ranks.link_gbps=10", "ranks.link_latency_us=5"] {
        refused(&[set], &["ranks.hop = \"copy\"", "ranks.link_gbps"]);
    }
    refused(&["ranks.hop=copy", "ranks.link_latency_us=5"], &["ranks.link_gbps"]);
    let config = least(&["ranks.hop=copy", "ranks.link_gbps=10", "ranks.link_latency_us=5"]);
    let link = config.link().expect("a link");
    assert_eq!((link.latency.as_nanos(), link.bytes_per_sec), (5_000, 1.25e9));
}

#[test]
fn tensor_parallelism_needs_heads_that_divide_and_nothing_else() {
    let tp = |ranks: &str, more: &[&str]| {
        let mut sets = vec!["ranks.strategy=tp".to_owned(), format!("ranks.count={ranks}")];
        sets.extend(more.iter().map(|&set| set.to_owned()));
        Config::parse(LEAST, Path::new("some/tiny.toml"), &sets)
    };
    let says = tp("2", &[]).expect_err("3 heads on 2 ranks").to_string();
    for part in ["model.heads = 3", "ranks.count = 2", "\"rtp\", which has no such limit"] {
        assert!(says.contains(part), "{says}");
    }
    // All ranks see all rows: one is enough, and one slice has them all.
    tp("3", &["train.batch=1"]).expect("a row for all ranks");
    tp("3", &["train.accumulation=8"]).expect("micro-batches of the whole batch");
    let says = tp("3", &["train.accumulation=9"]).expect_err("9 micro-batches").to_string();
    assert!(says.contains("on 3 ranks is at most 8 rows each"), "{says}");
    least(&["ranks.count=2"]);
}

#[test]
fn settings_that_a_strategy_does_not_read_are_refused() {
    for strategy in ["ddp", "zero1", "fsdp", "tp"] {
        let set = format!("ranks.strategy={strategy}");
        let named = format!("\"{strategy}\"");
        refused(
            &[&set, "model.embedding=rows"],
            &["model.embedding = \"rows\"", &named, "\"auto\" or \"table\""],
        );
        refused(
            &[&set, "ranks.travel_bytes_max=64KiB"],
            &["ranks.travel_bytes_max is for ranks.strategy = \"rtp\"", &named],
        );
        let kept = [&set, "ranks.reshard_after_forward=false"];
        if strategy == "fsdp" {
            least(&kept);
        } else {
            refused(&kept, &["is for ranks.strategy = \"fsdp\" and means nothing to", &named]);
        }
        // What is set as it is anyway contradicts nothing.
        least(&[&set, "ranks.travel_bytes_max=4MiB", "model.embedding=table"]);
    }
    refused(&["ranks.reshard_after_forward=false"], &["means nothing to \"rtp\""]);
    least(&["model.embedding=rows", "ranks.travel_bytes_max=64KiB"]);
}
