//! The help is complete: what it shows is exactly the flags that are documented here.

#![allow(missing_docs, reason = "test names are claims")]

mod common;

use std::collections::BTreeSet;

use common::Place;

/// The flags that start a line of `help`, each of which must be explained.
fn flags(help: &str) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    let mut lines = help.lines().map(str::trim).peekable();
    while let Some(line) = lines.next() {
        let flag = line.split_whitespace().find(|word| word.starts_with("--"));
        let Some(flag) = flag.filter(|_| line.starts_with('-')) else { continue };
        let beside = line.rsplit("  ").next().filter(|text| !text.starts_with('-'));
        let text = beside.unwrap_or_else(|| lines.peek().copied().unwrap_or_default());
        assert!(text.split(' ').count() > 1, "{flag} is not explained: {text:?}");
        found.insert(flag);
    }
    found
}

fn check(args: &[&str], words: &[&str], wanted: &[&str]) {
    let help = Place::new().works(args);
    assert_eq!(flags(&help), wanted.iter().copied().collect(), "{args:?}");
    for word in words {
        assert!(help.contains(word), "{args:?} does not mention {word}");
    }
}

#[test]
fn the_command_names_its_commands() {
    check(&["--help"], &["train", "generate", "bench"], &["--help", "--version"]);
}

#[test]
fn train_names_every_flag() {
    let flags = ["--ranks", "--resume", "--threads", "--set", "--profile", "--help"];
    check(&["train", "--help"], &["<CONFIG>", "configs/quickstart.toml"], &flags);
}

#[test]
fn generate_names_every_flag() {
    let flags = [
        "--prompt",
        "--tokens",
        "--temperature",
        "--top-p",
        "--seed",
        "--ranks",
        "--threads",
        "--help",
    ];
    check(&["generate", "--help"], &["<FOLDER>", "model.safetensors"], &flags);
}

#[test]
fn bench_names_every_flag() {
    let flags = [
        "--ranks",
        "--strategy",
        "--threads",
        "--set",
        "--json",
        "--svg",
        "--rounds",
        "--steps",
        "--warmup",
        "--link-gbps",
        "--link-latency-us",
        "--help",
    ];
    check(&["bench", "--help"], &["<CONFIG>", "capacity", "rtp-inplace", "fsdp-keep"], &flags);
    let flags =
        ["--ranks", "--strategy", "--threads", "--set", "--json", "--bytes", "--verify", "--help"];
    check(&["bench", "capacity", "--help"], &["<CONFIG>", "model.layers", "1.5GiB"], &flags);
}

#[test]
fn the_version_is_the_crates() {
    let version = format!("rotifer {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(Place::new().works(&["--version"]), version);
}
