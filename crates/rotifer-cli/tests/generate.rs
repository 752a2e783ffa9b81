//! `rotifer generate`: the same text on any number of ranks, for any prompts.

#![allow(missing_docs, reason = "test names are claims")]

mod common;

use std::sync::Mutex;

use common::Place;
use rotifer::generate::Sampling;
use rotifer::session::{self, GenerateOptions};

/// A model of documents that all say "abcd": it ends a text where they end. With its end each has
/// five tokens, which do not divide the 16 of a row, so every token is seen at every position.
fn trained() -> Place {
    let place = Place::new();
    place.write("abcd.jsonl", "{\"text\": \"abcd\"}\n".repeat(200));
    let mut args = vec!["train", "tiny.toml"];
    for set in ["data.train=abcd.jsonl", "train.steps=150", "train.eval_every=0", "train.out=abcd"]
    {
        args.extend(["--set", set]);
    }
    place.works(&args);
    place
}

/// What generating prints on several ranks, if it prints the same on each number of them.
fn on_ranks(place: &Place, ranks: &[&str], more: &[&str]) -> String {
    let on =
        |n| place.works(&[&["generate", "abcd", "--ranks", n, "--threads", "1"], more].concat());
    let first = on(ranks[0]);
    for n in &ranks[1..] {
        assert_eq!(on(n), first, "{n} ranks, {more:?}");
    }
    first
}

#[test]
fn a_text_ends_where_documents_end() {
    let place = trained();
    let greedy = ["--prompt", "a", "--temperature", "0", "--tokens", "50"];
    assert_eq!(on_ranks(&place, &["1", "2", "3"], &greedy), "abcd\n");
    // An empty prompt starts where a document starts.
    let empty = ["--prompt", "", "--temperature", "0", "--tokens", "50"];
    assert_eq!(on_ranks(&place, &["1", "2"], &empty), "abcd\n");
    let cut = ["--prompt", "a", "--temperature", "0", "--tokens", "1"];
    assert_eq!(on_ranks(&place, &["1", "2"], &cut), "ab\n");
    let none = ["--prompt", "a", "--tokens", "0"];
    assert_eq!(on_ranks(&place, &["1", "2"], &none), "a\n");
}

#[test]
fn sampled_text_is_a_function_of_the_seed_alone() {
    let place = trained();
    // Hot enough that every token is a surprise.
    let hot = |seed| {
        let hot = ["--prompt", "x", "--temperature", "9", "--top-p", "1", "--tokens", "20"];
        on_ranks(&place, &["1", "2", "3"], &[&hot[..], &["--seed", seed]].concat())
    };
    assert_ne!(hot("1"), hot("2"));
    assert!(hot("1").starts_with('x'));
}

#[test]
fn several_prompts_are_as_good_as_one_each() {
    let place = trained();
    let prompts = ["--prompt", "a", "--prompt", "", "--prompt", "ab", "--prompt", "c"];
    let more = [&prompts[..], &["--temperature", "0", "--tokens", "9"]].concat();
    let texts = on_ranks(&place, &["1", "2", "3", "4"], &more);
    assert_eq!(texts, "abcd\n\nabcd\n\nabcd\n\ncd\n\n");
    let two = ["--prompt", "a", "--prompt", "ab", "--temperature", "0"];
    assert_eq!(on_ranks(&place, &["1", "7"], &two), "abcd\n\nabcd\n\n", "more ranks than prompts");
}

#[test]
fn a_prompt_longer_than_the_context_goes_on() {
    let place = trained();
    let prompt = format!("{}ab", "never seen, beyond the context. ".repeat(3));
    let more = ["--prompt", &prompt, "--temperature", "0", "--tokens", "20"];
    let text = on_ranks(&place, &["1", "2", "3"], &more);
    assert!(text.starts_with(&prompt) && text.len() > prompt.len() + 1, "{text}");
}

/// Bytes that are no text, mostly, on two ranks.
fn noise(prompts: &[&str]) -> GenerateOptions {
    let sampling =
        Sampling { tokens: 25, temperature: 9.0, top_p: 1.0, seed: 3, end_of_text: None };
    let prompts = prompts.iter().map(|p| (*p).to_owned()).collect();
    GenerateOptions { prompts, sampling, ranks: 2, threads: 1 }
}

#[test]
fn what_is_shown_while_it_grows_is_the_text() {
    let place = trained();
    let prompts = ["x", "", "caf\u{e9}"];
    let shown = Mutex::new(prompts.map(String::from));
    let show = |row: usize, text: &str| shown.lock().expect("no panic")[row].push_str(text);
    let texts = session::generate(&place.path("abcd"), &noise(&prompts), &show).expect("texts");
    assert_eq!(*shown.lock().expect("no panic"), texts[..]);
}

#[test]
fn no_prompt_is_an_error() {
    let place = trained();
    let error = session::generate(&place.path("abcd"), &noise(&[]), &|_, _| ());
    let error = error.expect_err("nothing to continue").to_string();
    assert!(error.contains("there is no prompt to continue; give one"), "{error}");
    let ran = place.run(&["generate", "abcd"]);
    assert_eq!(ran.code, Some(2), "misuse of the command line");
    assert!(ran.stderr.contains("--prompt <PROMPT>"), "{}", ran.stderr);
}
