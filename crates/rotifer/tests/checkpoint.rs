//! Files know no N: what any number of ranks saves, any number loads, bit for bit.

#![allow(missing_docs, reason = "test names are claims")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use common::{
    DDP, FSDP, FSDP_KEPT, HAND_OVER, Hops, IN_PLACE, OVERLAPPED, TP, Tokens, ZERO1, assemble,
    on_ranks, options, pieces, tiny, try_on_ranks,
};
use rotifer::checkpoint::{self, WEIGHTS};
use rotifer::models::{Gpt2, HfConfig, gpt2};
use rotifer::train::{TrainOptions, Trainer};
use rotifer_ring::launch::Failure;
use safetensors::SafeTensors;
use tempfile::tempdir;

/// Rows for eight ranks, of which the last have one less.
const BATCH: usize = 13;

type Weights = BTreeMap<String, Vec<f32>>;

/// What two runs that hold the same weights agree on.
struct Run {
    weights: Weights,
    /// Loss of the next batch, and of held-out rows.
    losses: [f64; 2],
}

fn run(
    ranks: usize,
    hops: Hops,
    spec: &Gpt2,
    ready: impl Fn(&mut Trainer<'_, rotifer::models::Decoder>) -> rotifer::Result<()> + Sync,
) -> Run {
    let options = TrainOptions { batch: BATCH, ..hops.with(&options()) };
    let tokens = Tokens { vocab_size: spec.vocab_size, seq: options.seq };
    let results = on_ranks(ranks, hops.mode, |comm, dev| {
        let mut trainer = Trainer::new(dev, comm, gpt2(spec), options.clone())?;
        ready(&mut trainer)?;
        let weights = pieces(dev, trainer.params(), |p| p.weights);
        let evaluated = trainer.evaluate(&tokens, 5)?;
        let next = trainer.accumulate(&tokens, 100, false)?.loss;
        Ok((weights, [next, evaluated]))
    });
    let losses = results[0].1;
    let weights = assemble(results.into_iter().map(|(weights, _)| weights).collect());
    Run { weights, losses }
}

/// Trains on some ranks and saves.
fn save(ranks: usize, hops: Hops, spec: &Gpt2, steps: u64, folder: &Path) -> Run {
    let tokens = Tokens { vocab_size: spec.vocab_size, seq: options().seq };
    run(ranks, hops, spec, |trainer| {
        for step in 0..steps {
            trainer.step(&tokens, step * BATCH as u64, false)?;
        }
        if trainer.comm().rank() == 0 {
            HfConfig::of(spec, Some("bytes"), Some(256)).write(folder)?;
        }
        checkpoint::save(trainer, folder)
    })
}

fn load(ranks: usize, hops: Hops, spec: &Gpt2, folder: &Path) -> Run {
    run(ranks, hops, spec, |trainer| checkpoint::load(trainer, folder))
}

fn assert_bits(what: &str, got: &Weights, want: &Weights) {
    assert!(got.keys().eq(want.keys()), "{what}: the same tensors");
    for (name, values) in want {
        let same = got[name].iter().zip(values).all(|(g, w)| g.to_bits() == w.to_bits());
        assert!(same && got[name].len() == values.len(), "{what}: {name}");
    }
}

#[test]
fn what_4_ranks_save_any_number_loads() {
    for tied in [true, false] {
        let spec = Gpt2 { tied, ..tiny() };
        let folder = tempdir().expect("a temporary folder");
        let saved = save(4, HAND_OVER, &spec, 3, folder.path());
        let path = folder.path().join(checkpoint::CONFIG);
        let described = HfConfig::read(&path).and_then(|hf| hf.model(&path)).expect("a model");
        assert_eq!((described.width, described.tied), (spec.width, tied));
        let rotated =
            [(1, HAND_OVER), (2, OVERLAPPED), (3, IN_PLACE), (4, HAND_OVER), (8, HAND_OVER)];
        let others = [(2, DDP), (3, ZERO1), (4, FSDP), (3, FSDP_KEPT), (5, TP)];
        for (ranks, hops) in rotated.into_iter().chain(others) {
            let what = format!("{ranks} ranks, {hops:?}, tied {tied}");
            let loaded = load(ranks, hops, &described, folder.path());
            assert_bits(&what, &loaded.weights, &saved.weights);
            for (got, want) in loaded.losses.into_iter().zip(saved.losses) {
                // As `assert_same_run`: sums over ranks in another order.
                assert!((got - want).abs() <= 2e-6 * want, "{what}: {got} instead of {want}");
            }
        }
    }
}

#[test]
fn the_file_of_initial_weights_is_the_same_for_any_n() {
    let spec = tiny();
    let file = |ranks, hops| {
        let folder = tempdir().expect("a temporary folder");
        save(ranks, hops, &spec, 0, folder.path());
        let names = fs::read_dir(folder.path()).expect("the folder").count();
        assert_eq!(names, 2, "config and weights, nothing else");
        fs::read(folder.path().join(WEIGHTS)).expect("weights")
    };
    let alone = file(1, HAND_OVER);
    for ranks in [2, 3, 4, 7, 8] {
        assert!(file(ranks, HAND_OVER) == alone, "{ranks} ranks");
    }
    assert!(file(3, IN_PLACE) == alone, "in place");
    for hops in [DDP, ZERO1, FSDP, FSDP_KEPT] {
        for ranks in [1, 3, 4] {
            assert!(file(ranks, hops) == alone, "{ranks} ranks, {hops:?}");
        }
    }
    // As many heads as tiny has.
    assert!(file(5, TP) == alone, "tp");
}

#[test]
fn the_file_has_pytorchs_layouts() {
    for tied in [true, false] {
        let spec = Gpt2 { tied, ..tiny() };
        let folder = tempdir().expect("a temporary folder");
        let saved = save(3, HAND_OVER, &spec, 1, folder.path());
        let bytes = fs::read(folder.path().join(WEIGHTS)).expect("weights");
        let file = SafeTensors::deserialize(&bytes).expect("a valid file");
        assert_eq!(file.len(), saved.weights.len());
        let head = file.tensor("lm_head.weight");
        assert_eq!(head.is_err(), tied, "a tied head has no table of its own");
        for (name, view) in file.iter() {
            let stored = view.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
            let (rows, stored) = (view.shape()[0], stored.collect::<Vec<_>>());
            // A `Conv1D` stores [inputs, outputs], but these are cut along their outputs; the
            // second of each pair is cut along its inputs, the order of the file.
            let turned = ["attn.c_attn.weight", "mlp.c_fc.weight"];
            let is_turned = turned.iter().any(|end| name.ends_with(end));
            let cols = stored.len() / rows;
            let at = |i: usize| if is_turned { i % rows * cols + i / rows } else { i };
            let same = |(i, w): (usize, &f32)| stored[at(i)].to_bits() == w.to_bits();
            assert!(saved.weights[name].iter().enumerate().all(same), "{name}");
        }
    }
}

/// A saved model whose file has been through `damage`; what loading it says on 1 and 3 ranks.
fn check_damaged(damage: impl Fn(&mut Vec<u8>), says: &str) {
    let spec = tiny();
    let folder = tempdir().expect("a temporary folder");
    save(2, HAND_OVER, &spec, 0, folder.path());
    let path = folder.path().join(WEIGHTS);
    let mut bytes = fs::read(&path).expect("weights");
    damage(&mut bytes);
    fs::write(&path, bytes).expect("a file that can be written");
    for ranks in [1, 3] {
        let failure = try_on_ranks(ranks, HAND_OVER.mode, |comm, dev| {
            let trainer = Trainer::new(dev, comm, gpt2(&spec), options())?;
            checkpoint::load(&trainer, folder.path())
        });
        let Err(Failure::Failed { cause, .. }) = failure else { panic!("{says}: {failure:?}") };
        assert!(cause.to_string().contains(says), "{cause} instead of {says}");
    }
}

/// Replaces text of the header by text of the same length.
fn edit(from: &'static str, to: &'static str) -> impl Fn(&mut Vec<u8>) {
    assert_eq!(from.len(), to.len());
    move |bytes| {
        let at = bytes.windows(from.len()).position(|w| w == from.as_bytes()).expect("in there");
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    }
}

#[test]
fn damaged_files_are_refused() {
    let set_length =
        |length: u64| move |b: &mut Vec<u8>| b[..8].copy_from_slice(&length.to_le_bytes());
    check_damaged(|b| b.truncate(0), "has no header");
    check_damaged(|b| b.truncate(7), "has no header");
    check_damaged(|b| b.truncate(100), "does not fit a file of 100");
    check_damaged(|b| b.truncate(b.len() - 1), "does not fit the file");
    check_damaged(set_length(u64::MAX), "a header of 18446744073709551615 bytes");
    check_damaged(set_length(90_000_000), "a header of 90000000 bytes does not fit");
    check_damaged(set_length(0), "its header is no safetensors header");
    check_damaged(set_length(60), "its header is no safetensors header");
    check_damaged(|b| b[8] = 0xff, "its header is no safetensors header");
    check_damaged(edit("F32", "I32"), "but the model has F32");
    check_damaged(edit("F32", "F16"), "is F16 [257, 40], but has the bytes 0 to 41120");
    check_damaged(edit("[257,40]", "[40,257]"), "[40, 257], but the model has F32 [257, 40]");
    check_damaged(edit("wte.weight", "wte.height"), "tensor transformer.wte.weight is missing");
}
