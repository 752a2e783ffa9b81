//! Wrong input is refused before anything starts: exit code 1, one line that says what to change,
//! and nothing left behind.

#![allow(missing_docs, reason = "test names are claims")]

mod common;

use std::fs;
use std::path::Path;

use common::{Place, Ran};

/// Refuses `tiny.toml` with each of these overrides.
fn check(place: &Place, cases: &[(&str, &[&str])]) {
    for (set, parts) in cases {
        place.refuses(&["train", "tiny.toml", "--set", set], parts);
    }
}

#[test]
fn configs_that_cannot_be_read() {
    let place = Place::new();
    place.refuses(&["train", "nowhere.toml"], &["cannot read the config nowhere.toml"]);
    place.write("broken.toml", "[model]\nwidth = \n");
    place.refuses(&["train", "broken.toml"], &["broken.toml:2"]);
    place.write("other.toml", "[model]\nwidht = 64\n");
    let known = &["other.toml:2: there is no model.widht; did you mean model.width?"];
    place.refuses(&["train", "other.toml"], known);
    place.write("half.toml", "[model]\nwidth = 64\n");
    place.refuses(&["train", "half.toml"], &["half.toml", "is missing"]);
}

#[test]
fn overrides_that_are_none() {
    let cases: &[(&str, &[&str])] = &[
        ("train.steps", &["--set train.steps: write it as section.key=value"]),
        ("steps=3", &["--set steps=3: write it as section.key=value"]),
        ("train.stepz=3", &["there is no train.stepz; did you mean train.steps?"]),
        ("trian.steps=3", &["there is no section trian", "did you mean train.steps?"]),
        ("model.lr=3", &["there is no model.lr; did you mean optimizer.lr?"]),
        ("train.steps=many", &["train.steps", "many", "expected a whole number of 0 or more"]),
        ("optimizer.kind=adam", &["optimizer.kind", "adam", "adamw", "sgd"]),
    ];
    check(&Place::new(), cases);
}

#[test]
fn sizes_that_contradict_each_other() {
    let cases: &[(&str, &[&str])] = &[
        ("model.heads=3", &["model.heads = 3 does not divide model.width = 20", "18 and 21"]),
        ("model.heads=0", &["model.heads is 0; it must be at least 1"]),
        ("data.seq=17", &["data.seq = 17 exceeds model.context = 16", "raise the context"]),
        ("train.steps=0", &["train.steps is 0; it must be at least 1"]),
        ("train.accumulation=4", &["train.accumulation = 4", "lower it or raise the batch"]),
        ("optimizer.lr=-1", &["optimizer.lr is -1; it must be above 0"]),
        ("schedule.warmup_steps=5", &["train.steps = 4", "shorten them or train longer"]),
        ("data.validation_fraction=0", &["train.eval_every is 2", "data.validation_fraction"]),
    ];
    check(&Place::new(), cases);
}

#[test]
fn ranks_that_cannot_be() {
    let place = Place::new();
    let refuses = |more: &[&str], parts| {
        place.refuses(&[&["train", "tiny.toml"], more].concat(), parts);
    };
    refuses(&["--ranks", "0"], &["ranks.count is 0; it must be at least 1"]);
    let few = ["7 ranks cannot share train.batch = 6 rows", "raise the batch or lower"];
    refuses(&["--ranks", "7"], &few);
    refuses(&["--threads", "0"], &["ranks.threads=0", "a whole number of 1 or more"]);
    let single = ["ranks.strategy = \"single\" is for one rank", "set strategy = \"rtp\""];
    refuses(&["--set", "ranks.strategy=single"], &single);
    let tp = ["--ranks", "6", "--set", "ranks.strategy=tp"];
    refuses(&tp, &["does not divide by ranks.count = 6", "\"rtp\", which has no such limit"]);
    let rows = ["--set", "ranks.strategy=fsdp", "--set", "model.embedding=rows"];
    refuses(&rows, &["model.embedding = \"rows\"", "\"fsdp\" does not have"]);
}

#[test]
fn data_that_is_none() {
    let place = Place::new();
    place.write("empty.txt", "");
    place.write("latin1.txt", b"caf\xe9 au lait");
    place.write("short.txt", "hello");
    fs::create_dir(place.path("folder")).expect("a new folder");
    check(
        &place,
        &[
            ("data.train=nowhere.txt", &["there is no nowhere.txt; paths start in the folder"]),
            ("data.train=empty.txt", &["empty.txt is empty"]),
            ("data.train=latin1.txt", &["latin1.txt is not UTF-8 text: byte 3", "Convert"]),
            ("data.train=folder", &["folder matches no file"]),
            ("data.train=[]", &["data.train"]),
        ],
    );
    let short = ["train", "tiny.toml", "--set", "data.train=short.txt", "--ranks", "3"];
    let says = ["1 sequences of 16, fewer than the 3 ranks", "add data or lower ranks.count"];
    place.refuses(&short, &says);
}

#[test]
fn an_output_folder_that_is_not_empty() {
    let place = Place::new();
    fs::create_dir(place.path("taken")).expect("a new folder");
    place.write("taken/notes.txt", "do not lose me");
    let cases: &[(&str, &[&str])] = &[
        ("train.out=taken", &["taken exists already; choose another folder (train.out)"]),
        ("train.out=text.txt", &["text.txt"]),
    ];
    check(&place, cases);
    assert_eq!(place.read("taken/notes.txt"), "do not lose me");
    // Bad data is found before the folder is made.
    let both = ["train", "tiny.toml", "--set", "train.out=new/run", "--set", "data.train=nowhere"];
    place.refuses(&both, &["there is no nowhere"]);
}

#[test]
fn benchmarks_of_nothing() {
    let place = Place::new();
    let refuses = |more: &[&str], parts: &[&str]| {
        place.refuses(&[&["bench", "tiny.toml"], more].concat(), parts);
    };
    refuses(&["--strategy", "rtp,rpt-copy"], &["no strategy \"rpt-copy\"; did you mean rtp-copy?"]);
    let known = ["the strategies are rtp, rtp-copy, rtp-inplace, ddp", "and all"];
    refuses(&["--strategy", "pipeline"], &known);
    refuses(&["--ranks", "2,0"], &["a benchmark cannot have 0 ranks; ask for 1 or more"]);
    refuses(&["--rounds", "0"], &["0 rounds; ask for 1 or more"]);
    refuses(&["--steps", "0"], &["0 steps; ask for 1 or more"]);
    refuses(&["--threads", "0"], &["ranks.threads=0", "a whole number of 1 or more"]);
    refuses(&["--link-latency-us", "5"], &["a simulated link needs", "ranks.link_gbps"]);
    refuses(&["--link-gbps", "0"], &["ranks.link_gbps is 0; it must be above 0"]);
    refuses(&["--ranks", "7,8"], &["nothing can be measured: rtp on 7 rank(s): ", "7 ranks"]);
    refuses(&["--set", "data.train=nowhere.txt"], &["there is no nowhere.txt"]);
    refuses(&["--json", "no/where.json"], &["cannot write no/where.json"]);
    refuses(&["--svg", "."], &["cannot write ."]);
}

#[test]
fn capacities_without_a_limit() {
    let place = Place::new();
    for bytes in ["many", "4Mb", "", "-1KiB", "1.2.3GiB"] {
        let bytes = format!("--bytes={bytes}");
        let says = ["is not a number of bytes; write it as 65536 or 4MiB"];
        place.refuses(&["bench", "capacity", "tiny.toml", &bytes], &says);
    }
    let refuses = |more: &[&str], parts: &[&str]| {
        let args = ["bench", "capacity", "tiny.toml", "--bytes", "1MiB"];
        place.refuses(&[&args[..], more].concat(), parts);
    };
    refuses(&["--ranks", "0"], &["0 ranks; ask for 1 or more"]);
    refuses(&["--strategy", "fdsp"], &["no strategy \"fdsp\"; did you mean fsdp?"]);
    refuses(&["--json", "no/where.json"], &["cannot write no/where.json"]);
}

/// A folder `model` that can be damaged.
fn trained() -> Place {
    let place = Place::new();
    place.works(&["train", "tiny.toml", "--set", "train.out=model", "--set", "train.steps=2"]);
    place
}

fn replace(path: &Path, from: &[u8], to: &[u8]) {
    let bytes = fs::read(path).expect("a file");
    let at = bytes.windows(from.len()).position(|w| w == from).expect("what is to be replaced");
    let replaced = [&bytes[..at], to, &bytes[at + from.len()..]].concat();
    fs::write(path, replaced).expect("a file that can be written");
}

#[test]
fn generation_that_is_out_of_range() {
    let place = trained();
    let refuses = |more: &[&str], parts| {
        place.refuses(&[&["generate", "model", "--prompt", "The"], more].concat(), parts);
    };
    refuses(&["--temperature=-1"], &["temperature -1 must be 0 (greedy) or more"]);
    refuses(&["--temperature=nan"], &["temperature NaN must be 0 (greedy) or more"]);
    refuses(&["--top-p", "0"], &["top_p 0 must be above 0 and at most 1"]);
    refuses(&["--top-p", "1.5"], &["top_p 1.5 must be above 0 and at most 1"]);
    refuses(&["--ranks", "0"], &["0 ranks", "ask for 1 or more"]);
    refuses(&["--threads", "0"], &["0 threads", "ask for 1 or more"]);
}

#[test]
fn folders_that_hold_no_model() {
    let place = trained();
    let refuses = |folder: &str, ranks: &str, parts: &[&str]| {
        place.refuses(&["generate", folder, "--prompt", "The", "--ranks", ranks], parts);
    };
    refuses("nowhere", "1", &["cannot read nowhere/config.json"]);
    fs::create_dir(place.path("empty")).expect("a new folder");
    refuses("empty", "2", &["cannot read empty/config.json"]);
    fs::remove_file(place.path("model/model.safetensors")).expect("it was there");
    refuses("model", "1", &["cannot open model/model.safetensors"]);
}

/// Refuses the trained model after `damage` to its weights' file.
fn check_weights(damage: impl Fn(&Path), parts: &[&str]) {
    let place = trained();
    damage(&place.path("model/model.safetensors"));
    for ranks in ["1", "3"] {
        let parts = [&["model/model.safetensors"], parts].concat();
        place.refuses(&["generate", "model", "--prompt", "The", "--ranks", ranks], &parts);
    }
}

fn cut(path: &Path, bytes: u64) {
    let file = fs::OpenOptions::new().write(true).open(path).expect("a file");
    let len = file.metadata().expect("a length").len();
    file.set_len(len - bytes).expect("a file that can be cut");
}

#[test]
fn weights_that_are_cut_short() {
    check_weights(|path| cut(path, 4), &["tensor transformer.ln_f.bias does not fit the file"]);
    check_weights(|path| cut(path, 20_000), &["bytes", "cut short or belongs to another model"]);
}

#[test]
fn weights_with_a_huge_header() {
    let huge = |path: &Path| {
        let mut bytes = fs::read(path).expect("a file");
        bytes[..8].copy_from_slice(&(u64::MAX / 2).to_le_bytes());
        fs::write(path, bytes).expect("a file that can be written");
    };
    check_weights(huge, &["a header of 9223372036854775807 bytes does not fit a file of"]);
}

#[test]
fn weights_of_another_model() {
    let rename = |path: &Path| replace(path, b"h.0.mlp.c_fc.bias", b"h.0.mlp.c_fc.bios");
    check_weights(rename, &["tensor transformer.h.0.mlp.c_fc.bias is missing"]);
    let turn = |path: &Path| replace(path, b"[20,80]", b"[80,20]");
    check_weights(turn, &["c_fc.weight is F32 [80, 20], but the model has F32 [20, 80]"]);
    let retype = |path: &Path| replace(path, b"F32", b"I32");
    check_weights(retype, &["is I32 [", "but the model has F32 ["]);
}

#[test]
fn descriptions_that_are_none() {
    let damages: [(&str, &str, &[&str]); 8] = [
        ("{", "[", &["config.json", "line 2"]),
        ("gpt2", "gpt9", &["config.json: model_type is \"gpt9\""]),
        ("gelu_new", "relu", &["activation_function \"relu\" is none of gelu_new"]),
        ("\"n_head\": 5", "\"n_head\": 3", &["n_embd (20) is no multiple of n_head (3)"]),
        ("\"n_layer\": 1", "\"n_layer\": 0", &["config.json with a size of 0"]),
        ("\"n_layer\": 1", "\"n_layer\": 2", &["belongs to another model"]),
        // No memory is taken for it, not on any rank.
        ("\"n_embd\": 20", "\"n_embd\": 20000000000000000", &["belongs to another model"]),
        ("\"bytes\"", "\"words\"", &["config.json", "only models of bytes"]),
    ];
    for (from, to, parts) in damages {
        let place = trained();
        replace(&place.path("model/config.json"), from.as_bytes(), to.as_bytes());
        place.refuses(&["generate", "model", "--prompt", "The", "--ranks", "2"], parts);
    }
}

#[test]
fn one_of_several_processes_without_a_transport() {
    let place = Place::new();
    for variable in ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"] {
        let before = place.listing();
        let mut command = place.command(&["train", "tiny.toml"]);
        let ran: Ran = command.env(variable, "4").output().expect("the command starts").into();
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""), "{variable}: {}", ran.stderr);
        for part in ["error: ", "started 4 processes of rotifer", "--ranks 4"] {
            assert!(ran.stderr.contains(part), "{variable}: no {part:?} in {}", ran.stderr);
        }
        assert_eq!(place.listing(), before, "{variable}: leaves nothing behind");
    }
}
