//! What the strategies have in common beyond the curve of `parity.rs`: sums to the bit, tables of
//! several groups, texts, and memory as their definition has it.

#![allow(missing_docs, reason = "test names are claims")]

mod common;

use common::{
    ALL_HOPS, DATA_PARALLEL, DDP, FSDP, FSDP_KEPT, HAND_OVER, Hops, OTHERS, TP, TP_BLOCKING,
    WORLDS, ZERO1, assert_same_run, on_ranks, options, tiny, train,
};
use rotifer::generate::{Sampling, generate};
use rotifer::layers::Logits;
use rotifer::models::{Gpt2, gpt2};
use rotifer::strategy::Strategy;
use rotifer::train::{TrainOptions, Trainer, plan};
use rotifer_device::{MemoryPlan, Purpose};

/// Data parallelism in any form sums the same numbers in the order of ranks. The one number that
/// differs is the norm, whose squares lie on different ranks; so nothing is clipped.
#[test]
fn data_parallel_strategies_make_the_same_bits() {
    // A tied table's two gradients are added before or after they are summed.
    let spec = Gpt2 { tied: false, dropout: 0.2, ..tiny() };
    let options = TrainOptions { clip_norm: None, ..options() };
    for ranks in WORLDS {
        let want = train(ranks, DDP, &spec, &options, 3);
        for hops in DATA_PARALLEL {
            let got = train(ranks, hops, &spec, &options, 3);
            let what = format!("{ranks} ranks, {hops:?}");
            assert_eq!(got.gradients, want.gradients, "{what}");
            assert_eq!(got.weights, want.weights, "{what}");
            assert_eq!(got.evaluated.to_bits(), want.evaluated.to_bits(), "{what}");
        }
    }
}

/// The same number of ranks gives the same bits again.
#[test]
fn the_same_world_gives_the_same_bits() {
    for hops in DATA_PARALLEL.into_iter().chain([TP, TP_BLOCKING]) {
        // As many ranks as heads, under tensor parallelism.
        let ranks = if hops.strategy == Strategy::Tp { 5 } else { 3 };
        let [one, two] = [0, 1].map(|_| train(ranks, hops, &tiny(), &options(), 3));
        assert_eq!((one.reports, one.weights), (two.reports, two.weights), "{hops:?}");
        assert_eq!(one.evaluated.to_bits(), two.evaluated.to_bits(), "{hops:?}");
    }
}

#[test]
fn document_masks_give_the_one_rank_run() {
    let options = TrainOptions { documents: true, ..options() };
    let want = train(1, HAND_OVER, &tiny(), &options, 4);
    for hops in OTHERS {
        for ranks in hops.worlds(5) {
            let got = train(ranks, hops, &tiny(), &options, 4);
            assert_same_run(&format!("{ranks} ranks, {hops:?}"), &got, &want);
        }
    }
}

/// 7 rows in 3 micro-batches over 4 ranks leave ranks without a row, which take part all the same.
#[test]
fn a_rank_without_rows_takes_part() {
    let options = TrainOptions { accumulation: 3, ..options() };
    let want = train(1, HAND_OVER, &tiny(), &options, 4);
    for hops in DATA_PARALLEL {
        let got = train(4, hops, &tiny(), &options, 4);
        assert_same_run(&format!("{hops:?}"), &got, &want);
    }
}

/// More classes than a visit brings: the table is cut in three groups, the last of which ends in
/// the middle of a rank's share.
#[test]
fn tables_of_several_groups_give_the_one_rank_run() {
    let options = TrainOptions { batch: 4, seq: 6, ..options() };
    for (tied, logits) in [(true, Logits::Recomputed), (false, Logits::Kept)] {
        let spec = Gpt2 { vocab_size: 8195, width: 6, heads: 3, layers: 1, tied, logits, ..tiny() };
        let want = train(1, HAND_OVER, &spec, &options, 3);
        for hops in ALL_HOPS.into_iter().chain(OTHERS) {
            let got = train(3, hops, &spec, &options, 3);
            assert_same_run(&format!("tied {tied}, {logits:?}, {hops:?}"), &got, &want);
        }
    }
}

/// Texts of two prompts, the likeliest tokens and drawn ones.
fn texts(ranks: usize, hops: Hops) -> Vec<Vec<Vec<i32>>> {
    let logits_rows = 2_usize.div_ceil(hops.strategy.num_slices(ranks));
    let options = TrainOptions { logits_rows, ..hops.with(&options()) };
    let told = on_ranks(ranks, hops.mode, |comm, dev| {
        let mut trainer = Trainer::new(dev, comm, gpt2(&tiny()), options.clone())?;
        // The second prompt is longer than the rows that the model was built for.
        let prompts = [vec![1, 2, 3], (0..23).collect()];
        let of = |trainer: &mut Trainer<'_, _>, temperature| {
            let sampling =
                Sampling { tokens: 9, temperature, top_p: 0.9, seed: 5, end_of_text: None };
            let mut told = 0;
            let texts = generate(trainer, &prompts, &sampling, |_, _| told += 1)?;
            assert_eq!(told, 2 * 9, "every rank learns every token");
            Ok::<_, rotifer::Error>(texts)
        };
        let greedy = of(&mut trainer, 0.0)?;
        // What training leaves behind is of no use to sampling, and the other way round.
        let tokens = common::Tokens { vocab_size: 257, seq: options.seq };
        trainer.step(&tokens, 0, false)?;
        let trained = of(&mut trainer, 0.0)?;
        Ok(vec![greedy, trained, of(&mut trainer, 0.8)?])
    });
    assert!(told.iter().all(|texts| *texts == told[0]), "{ranks} ranks, {hops:?}: all the same");
    told.into_iter().next().expect("a rank")
}

#[test]
fn every_strategy_writes_the_texts_of_one_rank() {
    let want = texts(1, HAND_OVER);
    for hops in OTHERS {
        for ranks in hops.worlds(5) {
            assert_eq!(texts(ranks, hops), want, "{ranks} ranks, {hops:?}");
        }
    }
}

/// A model whose units divide by four, with more weights than activations.
fn planned(ranks: usize, hops: Hops, spec: &Gpt2, accumulation: usize, batch: usize) -> MemoryPlan {
    let options = TrainOptions {
        batch,
        accumulation,
        verify_replicated: false,
        travel_bytes_max: 4 << 20,
        ..hops.with(&options())
    };
    on_ranks(ranks, hops.mode, |comm, _| plan(&mut gpt2(spec), &comm, &options))[0]
}

fn even() -> Gpt2 {
    Gpt2 { vocab_size: 1024, width: 128, heads: 4, mlp_width: 512, layers: 6, ..tiny() }
}

/// Whole weights, gradients, state or a quarter of each, but for what is replicated everywhere;
/// a slice of the activations, or all of them.
#[test]
fn ranks_hold_what_their_strategy_says_4_ranks() {
    let spec = even();
    let one = planned(1, HAND_OVER, &spec, 1, 8);
    let share = |hops, purpose| {
        let rank = planned(4, hops, &spec, 1, 8).bytes(purpose);
        rank as f64 / one.bytes(purpose) as f64
    };
    let near = |hops, purpose, want: f64| {
        let got = share(hops, purpose);
        assert!((got - want).abs() < 0.015, "{hops:?}, {purpose:?}: {got}, not {want}");
    };
    let [weights, gradients, state] = [Purpose::Weights, Purpose::Gradients, Purpose::Optimizer];
    for (hops, shares) in [
        (DDP, [1.0, 1.0, 1.0]),
        (ZERO1, [1.0, 1.0, 0.25]),
        (FSDP, [0.25; 3]),
        (FSDP_KEPT, [0.25; 3]),
        (TP, [0.25; 3]),
        (HAND_OVER, [0.25; 3]),
    ] {
        for (purpose, share) in [weights, gradients, state].into_iter().zip(shares) {
            near(hops, purpose, share);
        }
        if hops != TP {
            near(hops, Purpose::Activations, 0.25);
        }
    }
    // Of a block's activations tensor parallelism cuts those of attention and of the MLP's inside.
    let kept = share(TP, Purpose::Activations);
    assert!(kept > 0.3 && kept < 0.8, "{kept}");
    // Whole units, of which an MLP is the largest: two of each kind, or all of them.
    let travel = |hops| planned(4, hops, &spec, 1, 8).bytes(Purpose::Travel);
    assert_eq!((travel(DDP), travel(ZERO1), travel(HAND_OVER)), (0, 0, 0));
    let largest = 4 * (2 * 128 + 1) * 512;
    assert_eq!(travel(FSDP), 4 * largest);
    let units = one.bytes(weights) as f64;
    let kept = (travel(FSDP_KEPT) - 2 * largest) as f64 / units;
    assert!((kept - 1.0).abs() < 0.015, "all units are kept: {kept}");
    assert_eq!(travel(TP), 4 * 8 * 19 * 128, "a share of the batch's sums");
}

#[test]
fn accumulation_costs_no_byte() {
    for hops in ALL_HOPS.into_iter().chain(OTHERS) {
        for ranks in [1, 2, 4] {
            let bytes =
                |batch, accumulation| planned(ranks, hops, &even(), accumulation, batch).total();
            assert_eq!(bytes(8, 1), bytes(32, 4), "{ranks} ranks, {hops:?}");
        }
    }
}

/// A tied table is one set of weights, gradients and state under every strategy.
#[test]
fn tying_saves_one_table() {
    for hops in OTHERS {
        let of = |tied| planned(4, hops, &Gpt2 { tied, ..even() }, 1, 8);
        let (tied, untied) = (of(true), of(false));
        let table = 1024 * 128 * 4;
        for (purpose, copies) in
            [(Purpose::Weights, 1), (Purpose::Gradients, 1), (Purpose::Optimizer, 2)]
        {
            let whole = match (hops.strategy, purpose) {
                (Strategy::Ddp, _) => true,
                (Strategy::Zero1, purpose) => purpose != Purpose::Optimizer,
                _ => false,
            };
            let saved = untied.bytes(purpose) - tied.bytes(purpose);
            assert_eq!(saved, copies * if whole { table } else { table / 4 }, "{hops:?}");
        }
    }
}
