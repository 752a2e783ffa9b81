//! Whenever a save ends, and whatever becomes of its files, what is loaded is a whole checkpoint or
//! an error that names the file.

#![allow(missing_docs, reason = "test names are claims")]

mod common;

use std::fs;
use std::path::Path;

use common::saves::{self, Snapshot, assert_bits, goes_on, saved_run};
use common::{DDP, FSDP, HAND_OVER, Hops, on_ranks, options, tiny, try_on_ranks};
use rotifer::Error;
use rotifer::checkpoint::{self, Checkpoint, Disk, STATE};
use rotifer::models::{Gpt2, gpt2};
use rotifer::train::Trainer;
use tempfile::tempdir;

/// Small, so that hundreds of saves take seconds.
fn small() -> Gpt2 {
    Gpt2 { layers: 1, mlp_width: 30, ..tiny() }
}

/// Numbers that are the same in every run (Knuth's MMIX generator).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: u64) -> u64 {
        let next = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = next.wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder that can be made");
    for entry in fs::read_dir(from).expect("a folder") {
        let path = entry.expect("an entry").path();
        let target = to.join(path.file_name().expect("a name"));
        if path.is_dir() {
            copy(&path, &target);
        } else {
            fs::copy(&path, &target).expect("a file that can be copied");
        }
    }
}

/// What is in the newest checkpoint of a run, and its step.
fn newest(run: &Path) -> (u64, Snapshot) {
    let step = Checkpoint::find(run).unwrap_or_else(|e| panic!("{e}")).state().step;
    (step, goes_on(run, 1, HAND_OVER, &small(), &options(), 0).0)
}

/// A run with a checkpoint of 2 steps; one of 4 steps, to be saved again and again.
struct Runs {
    old: tempfile::TempDir,
    new: tempfile::TempDir,
    two: Snapshot,
    four: Snapshot,
}

fn runs() -> Runs {
    let (old, new) = (tempdir().expect("a folder"), tempdir().expect("a folder"));
    let (two, _) = saved_run(old.path(), 2, HAND_OVER, &small(), &options(), 2);
    let (four, _) = saved_run(new.path(), 2, HAND_OVER, &small(), &options(), 4);
    Runs { old, new, two, four }
}

/// Saves the newest checkpoint of `new` into `run` on a disk. Whether all of it was saved.
fn save_again(new: &Path, run: &Path, ranks: usize, hops: Hops, disk: &Disk) -> bool {
    let options = hops.with(&options());
    let checkpoint = Checkpoint::find(new).expect("a checkpoint");
    let saved = try_on_ranks(ranks, hops.mode, |comm, dev| {
        let mut trainer = Trainer::new(dev, comm, gpt2(&small()), options.clone())?;
        checkpoint::restore(&mut trainer, &checkpoint)?;
        // Only one is kept: the older one goes.
        saves::save(&trainer, run, disk, 1)
    });
    saved.is_ok()
}

#[test]
fn killed_at_any_byte_of_a_save_the_last_whole_checkpoint_is_found() {
    let Runs { old, new, two, four } = runs();
    let mut numbers = Numbers(7);
    for (ranks, hops) in [(2, HAND_OVER), (3, FSDP), (2, DDP)] {
        let all = u64::MAX;
        let disk = Disk::dying_after(all);
        let whole = tempdir().expect("a folder");
        copy(old.path(), whole.path());
        assert!(save_again(new.path(), whole.path(), ranks, hops, &disk));
        let changes = all - disk.left().expect("a disk that counts");
        assert!(changes > 100_000, "{changes} changes");
        let mut found = [0, 0];
        for i in 0..100 {
            // Anywhere, and often where files get their names and the old one goes.
            let at = match i % 4 {
                0 => numbers.below(changes),
                1 => changes - 1 - numbers.below(12),
                2 => changes - 1 - numbers.below(3000),
                _ => numbers.below(3000),
            };
            let run = tempdir().expect("a folder");
            copy(old.path(), run.path());
            let done = save_again(new.path(), run.path(), ranks, hops, &Disk::dying_after(at));
            assert!(!done, "a disk that dies after {at} of {changes} changes");
            let (step, held) = newest(run.path());
            let what = format!("{ranks} ranks, {hops:?}, dead after {at} of {changes}");
            match step {
                2 => assert_bits(&what, &held, &two),
                4 => assert_bits(&what, &held, &four),
                _ => panic!("{what}: a checkpoint of {step} steps"),
            }
            found[usize::from(step == 4)] += 1;
            if i % 10 == 0 {
                // The next save is not in its way, and leaves nothing unfinished behind.
                assert!(save_again(new.path(), run.path(), ranks, hops, &Disk::new()), "{what}");
                assert_bits(&what, &newest(run.path()).1, &four);
                let folder = run.path().join(checkpoint::CHECKPOINTS);
                let count = fs::read_dir(folder).expect("a folder").count();
                assert_eq!(count, 2, "{what}: the checkpoint and what names it");
            }
        }
        assert!(found[0] > 20 && found[1] > 5, "both outcomes were seen: {found:?}");
    }
}

#[test]
fn killed_in_the_first_save_there_is_none_or_a_whole_one() {
    let Runs { new, four, .. } = runs();
    let mut numbers = Numbers(11);
    let disk = Disk::dying_after(u64::MAX);
    let whole = tempdir().expect("a folder");
    assert!(save_again(new.path(), whole.path(), 2, HAND_OVER, &disk));
    let changes = u64::MAX - disk.left().expect("a disk that counts");
    let mut found = [0, 0];
    for i in 0..40 {
        let at = changes - 1 - numbers.below([20, 200, 5000, changes][i % 4]);
        let run = tempdir().expect("a folder");
        assert!(!save_again(new.path(), run.path(), 2, HAND_OVER, &Disk::dying_after(at)));
        match Checkpoint::find(run.path()) {
            Ok(_) => assert_bits(&format!("dead after {at}"), &newest(run.path()).1, &four),
            Err(error) => {
                let says = ["has no whole checkpoint yet", "is neither a checkpoint"];
                assert!(says.iter().any(|says| error.to_string().contains(says)), "{error}");
            }
        }
        found[usize::from(Checkpoint::find(run.path()).is_ok())] += 1;
    }
    assert!(found[0] > 5 && found[1] > 2, "both outcomes were seen: {found:?}");
}

/// Loads the newest checkpoint of a run on some ranks; what is wrong with it. A panic of a rank is
/// a failure of the test.
fn load(run: &Path, ranks: usize) -> Option<String> {
    let checkpoint = match Checkpoint::find(run) {
        Ok(checkpoint) => checkpoint,
        Err(error) => return Some(error.to_string()),
    };
    let loaded = try_on_ranks(ranks, HAND_OVER.mode, |comm, dev| {
        let mut trainer = Trainer::new(dev, comm, gpt2(&small()), options())?;
        checkpoint::restore(&mut trainer, &checkpoint)
    });
    let failure = loaded.err()?;
    assert!(!failure.to_string().contains("panicked"), "{failure}");
    Some(failure.to_string())
}

#[test]
fn mutated_files_are_loaded_or_refused_by_name() {
    let run = tempdir().expect("a folder");
    saves::saved_in_files(run.path(), 2, &small(), 2, 60_000);
    let folder = Checkpoint::find(run.path()).expect("a checkpoint").folder().to_owned();
    let mut files: Vec<_> = fs::read_dir(&folder).expect("a folder").collect();
    files.sort_by_key(|entry| entry.as_ref().expect("an entry").file_name());
    let files: Vec<_> = files.into_iter().map(|entry| entry.expect("an entry").path()).collect();
    assert!(files.len() > 8, "several files and their indices: {files:?}");
    let mut numbers = Numbers(13);
    let mut refused = 0;
    for i in 0..600 {
        let path = &files[i % files.len()];
        let original = fs::read(path).expect("a file");
        let mut bytes = original.clone();
        // The header's length and its JSON, where a change can mean something.
        let length = u64::try_from(bytes.len()).expect("a size").min(1500);
        for _ in 0..=numbers.below(3) {
            let at = numbers.below(length) as usize;
            match numbers.below(5) {
                0 => bytes[at] ^= 1 << numbers.below(8),
                1 => bytes[at] = b"0123456789,:[]{}\"-.eNa\\\0\xff"[numbers.below(25) as usize],
                2 => drop(bytes.remove(at)),
                3 => bytes.insert(at, bytes[at]),
                _ => bytes[at] = b'9',
            }
        }
        if numbers.below(10) == 0 {
            bytes.truncate(numbers.below(bytes.len() as u64) as usize);
        }
        fs::write(path, &bytes).expect("a file that can be written");
        if let Some(message) = load(run.path(), 1 + i % 2) {
            refused += 1;
            let name = folder.file_name().expect("a name").to_string_lossy();
            assert!(message.contains(&*name), "{message} names no file");
        }
        fs::write(path, original).expect("a file that can be written");
    }
    assert!(refused > 300, "{refused} of 600 were refused");
    assert_eq!(load(run.path(), 2), None, "the files as they were");
}

/// The header of a safetensors file: its length and its text, and what follows.
fn with_header(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

#[test]
fn hostile_headers_are_refused_by_tensor() {
    let run = tempdir().expect("a folder");
    saved_run(run.path(), 2, HAND_OVER, &small(), &options(), 1);
    let checkpoint = Checkpoint::find(run.path()).expect("a checkpoint");
    let tensor = |name: &str, rest: &str| format!("\"{name}\":{{\"dtype\":\"F32\",{rest}}}");
    let at = |from: u64, to: u64| format!("\"shape\":[2],\"data_offsets\":[{from},{to}]");
    let two = |a: String, b: String| format!("{{{},{}}}", tensor("a", &a), tensor("b", &b));
    let one = |rest: &str| format!("{{{}}}", tensor("a", rest));
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let many = format!("{{\"a\":{{\"dtype\":\"F32\",\"shape\":[{}1]}}}}", "1,".repeat(1000));
    let max = u64::MAX;
    for (header, says) in [
        (two(at(0, 8), at(4, 12)), "tensor b overlaps another"),
        (two(at(0, 8), at(0, 8)), "overlaps another"),
        (two(at(0, 8), at(12, 20)), "tensor b leaves a hole"),
        (one(&at(0, 4)), "tensor a is F32 [2], but has the bytes 0 to 4"),
        (one(&at(8, 0)), "but has the bytes 8 to 0"),
        (one(&at(max - 8, max)), "tensor a leaves a hole"),
        (one("\"shape\":[4000],\"data_offsets\":[0,16000]"), "tensor a does not fit the file"),
        (one("\"shape\":[2],\"data_offsets\":[-8,0]"), "tensor a: invalid value"),
        (one("\"shape\":[2],\"data_offsets\":[0,8.5]"), "tensor a: invalid type"),
        (one("\"shape\":[2],\"data_offsets\":[0,NaN]"), "no safetensors header"),
        (one(&format!("\"shape\":[{max},{max}],\"data_offsets\":[0,8]")), "but has the bytes"),
        (one("\"shape\":[2],\"data_offsets\":[0,99999999999999999999]"), "tensor a: "),
        (format!("{{{0},{0}}}", tensor("a", &at(0, 8))), "tensor a is there twice"),
        (deep, "its header is no safetensors header"),
        (many, "a list of at most 8 dimensions"),
        ("[]".to_owned(), "its header is no safetensors header"),
        ("{}".to_owned(), "has 1024 bytes behind its last tensor"),
    ] {
        for name in ["model.safetensors", "optimizer.safetensors"] {
            let path = checkpoint.folder().join(name);
            let original = fs::read(&path).expect("a file");
            fs::write(&path, with_header(&header, 1024)).expect("a file that can be written");
            let failure = on_ranks(1, HAND_OVER.mode, |comm, dev| {
                let mut trainer = Trainer::new(dev, comm, gpt2(&small()), options())?;
                Ok(checkpoint::restore(&mut trainer, &checkpoint).err())
            });
            let Some(Error::Checkpoint { path: named, what }) = &failure[0] else {
                panic!("{says}: {failure:?}");
            };
            assert!(*named == path && what.contains(says), "{what} instead of {says}");
            fs::write(&path, original).expect("a file that can be written");
        }
    }
}

#[test]
fn hostile_state_is_refused() {
    let run = tempdir().expect("a folder");
    saved_run(run.path(), 2, HAND_OVER, &small(), &options(), 1);
    let folder = Checkpoint::find(run.path()).expect("a checkpoint").folder().to_owned();
    let path = folder.join(STATE);
    let original = fs::read_to_string(&path).expect("text");
    let check = |text: String, says: &str| {
        assert_ne!(text, original, "{says}");
        fs::write(&path, text).expect("a file that can be written");
        let message = Checkpoint::find(run.path()).expect_err(says).to_string();
        assert!(message.contains(says), "{message} instead of {says}");
    };
    check(original.replace("\"version\": 1", "\"version\": 2"), "is version 2, but");
    check(original.replace("\"version\"", "\"v\""), "says no version of a checkpoint");
    check(original.replace("\"rows\": 7", "\"rows\": 8"), "has 8 rows and 1 updates in 1 steps");
    check(original.replace("\"step\": 1", "\"step\": 1e3"), "state.json: ");
    check(original.replace("\"step\": 1", "\"step\": NaN"), "state.json: ");
    check(original.replace("\"heads\": 5", "\"heads\": 0"), "model.heads is 0");
    check(original.replace("\"model.safetensors\"", "\"../state.json\""), "no name of a file");
    check(original.replace("\"model.safetensors\"", "\"gone\""), "cannot open");
    check(original.replace("\"step\": 1", "\"stop\": 1"), "unknown field `stop`");
    check("[".repeat(200_000), "says no version of a checkpoint");
    check(" ".repeat(2 << 20), "is longer than");
    fs::write(&path, &original).expect("a file that can be written");
    let weights = folder.join("model.safetensors");
    let bytes = fs::read(&weights).expect("weights");
    fs::write(&weights, &bytes[..bytes.len() - 1]).expect("a file that can be written");
    let message = Checkpoint::find(run.path()).expect_err("cut short").to_string();
    assert!(message.contains("model.safetensors") && message.contains("was saved with"));
    fs::write(run.path().join("checkpoints/latest"), "../../x").expect("a file");
    let message = Checkpoint::find(run.path()).expect_err("no name").to_string();
    assert!(message.contains("holds no name such as step-000100"), "{message}");
}
