//! Any number of ranks gives what one rank gives: loss, every gradient, ten steps of training,
//! evaluation; whatever form the hops take and whatever is kept or recomputed.

#![allow(missing_docs, reason = "test names are claims")]

mod common;

use common::{
    ALL_HOPS, DATA_PARALLEL, HAND_OVER, IN_PLACE, OVERLAPPED, Outcome, TP, TP_BLOCKING, WORLDS,
    assert_same_run, options, tiny, train,
};
use rotifer::Slices;
use rotifer::layers::{EmbeddingRoute, Hidden, Logits};
use rotifer::models::Gpt2;
use rotifer::train::TrainOptions;
use rotifer_device::Activation;

/// Compares `hops` of all worlds with one rank.
fn check(what: &str, spec: &Gpt2, options: &TrainOptions, hops: &[common::Hops]) {
    let want = train(1, HAND_OVER, spec, options, 10);
    assert!(want.reports[9].loss < want.reports[0].loss, "{what}: training lowers the loss");
    for &hops in hops {
        for ranks in WORLDS {
            let got = train(ranks, hops, spec, options, 10);
            assert_same_run(&format!("{what}, {ranks} ranks, {hops:?}"), &got, &want);
        }
    }
}

#[test]
fn every_world_and_every_hop_gives_the_one_rank_run() {
    check("tied", &tiny(), &options(), &ALL_HOPS);
}

#[test]
fn an_untied_head_with_erf_gives_the_one_rank_run() {
    let spec = Gpt2 { tied: false, activation: Activation::GeluErf, ..tiny() };
    check("untied", &spec, &options(), &[HAND_OVER, OVERLAPPED]);
}

#[test]
fn recomputed_hidden_and_kept_logits_give_the_one_rank_run() {
    let spec = Gpt2 { mlp_hidden: Hidden::Recomputed, logits: Logits::Kept, ..tiny() };
    check("recomputed hidden, kept logits", &spec, &options(), &[HAND_OVER, OVERLAPPED, IN_PLACE]);
}

#[test]
fn both_embedding_routes_give_the_one_rank_run() {
    for embedding in [EmbeddingRoute::Table, EmbeddingRoute::Rows] {
        let spec = Gpt2 { embedding, ..tiny() };
        check(&format!("{embedding:?}"), &spec, &options(), &[HAND_OVER, OVERLAPPED, IN_PLACE]);
    }
}

#[test]
fn accumulation_gives_the_run_without() {
    let want = train(1, HAND_OVER, &tiny(), &options(), 10);
    for accumulation in [3, 7] {
        let options = TrainOptions { accumulation, ..options() };
        for ranks in WORLDS {
            for hops in [HAND_OVER, OVERLAPPED] {
                let got = train(ranks, hops, &tiny(), &options, 10);
                let what = format!("{ranks} ranks, {accumulation} micro-batches, {hops:?}");
                assert_same_run(&what, &got, &want);
            }
        }
    }
}

#[test]
fn dropout_masks_know_no_world() {
    let spec = Gpt2 { dropout: 0.2, ..tiny() };
    let options = TrainOptions { accumulation: 3, ..options() };
    check("dropout in micro-batches", &spec, &options, &ALL_HOPS);
    let whole = train(1, HAND_OVER, &spec, &common::options(), 10);
    assert_same_run(
        "dropout without accumulation",
        &whole,
        &train(4, OVERLAPPED, &spec, &options, 10),
    );
    let recomputed = Gpt2 { mlp_hidden: Hidden::Recomputed, logits: Logits::Kept, ..spec.clone() };
    let (kept, remade) = (one_rank(&spec), one_rank(&recomputed));
    assert_same_run("recomputed with dropout", &remade, &kept);
}

fn one_rank(spec: &Gpt2) -> Outcome {
    train(1, HAND_OVER, spec, &options(), 10)
}

#[test]
fn document_masks_give_the_one_rank_run() {
    check("documents", &tiny(), &TrainOptions { documents: true, ..options() }, &[HAND_OVER]);
    let with = train(1, HAND_OVER, &tiny(), &TrainOptions { documents: true, ..options() }, 1);
    let without = one_rank(&tiny());
    assert!(with.first.loss != without.first.loss, "the mask does something");
}

#[test]
fn initial_weights_know_no_world() {
    let want = train(1, HAND_OVER, &tiny(), &options(), 0).weights;
    for ranks in WORLDS {
        let got = train(ranks, HAND_OVER, &tiny(), &options(), 0).weights;
        assert_eq!(got, want, "{ranks} ranks");
    }
}

#[test]
fn the_same_world_gives_the_same_bits() {
    for hops in ALL_HOPS {
        let [one, two] = [0, 1].map(|_| train(3, hops, &tiny(), &options(), 4));
        assert_eq!(one.reports, two.reports, "{hops:?}");
        assert_eq!(one.weights, two.weights, "{hops:?}");
        assert_eq!(one.evaluated.to_bits(), two.evaluated.to_bits(), "{hops:?}");
    }
}

#[test]
fn a_rank_without_rows_turns_the_ring() {
    // 7 rows over 4 ranks are 1, 2, 2 and 2; in 3 micro-batches some ranks have a row, some none.
    let options = TrainOptions { accumulation: 3, ..options() };
    let rows = |micro, rank| Slices { rows: 7, count: 4, accumulation: 3, micro }.rows(rank).len();
    assert!(
        (0..3)
            .any(|micro| (0..4).any(|r| rows(micro, r) == 0) && (0..4).any(|r| rows(micro, r) > 0))
    );
    for embedding in [EmbeddingRoute::Table, EmbeddingRoute::Rows] {
        let spec = Gpt2 { embedding, ..tiny() };
        let want = train(1, HAND_OVER, &spec, &options, 4);
        for hops in ALL_HOPS {
            let what = format!("{embedding:?}, {hops:?}");
            assert_same_run(&what, &train(4, hops, &spec, &options, 4), &want);
        }
    }
}

/// 12 heads and a width of 48, so that there is a world of 2, 3, 4 and 6 for whole heads; nothing
/// else divides.
fn twelve_heads() -> Gpt2 {
    Gpt2 { heads: 12, width: 48, ..tiny() }
}

fn check_tensor_parallel(what: &str, spec: &Gpt2, options: &TrainOptions) {
    let want = train(1, HAND_OVER, spec, options, 10);
    for hops in [TP, TP_BLOCKING] {
        for ranks in [1, 2, 3, 4, 6] {
            let got = train(ranks, hops, spec, options, 10);
            assert_same_run(&format!("{what}, {ranks} ranks, {hops:?}"), &got, &want);
        }
    }
}

#[test]
fn data_parallel_strategies_give_the_one_rank_run() {
    check("tied", &tiny(), &options(), &DATA_PARALLEL);
}

#[test]
fn data_parallel_strategies_give_the_one_rank_run_untied_kept_dropout() {
    let spec = Gpt2 {
        tied: false,
        dropout: 0.2,
        logits: Logits::Kept,
        mlp_hidden: Hidden::Recomputed,
        ..tiny()
    };
    check("untied", &spec, &options(), &DATA_PARALLEL);
}

#[test]
fn data_parallel_strategies_accumulate() {
    let options = TrainOptions { accumulation: 3, ..options() };
    check("accumulation", &tiny(), &options, &DATA_PARALLEL);
}

#[test]
fn tensor_parallelism_gives_the_one_rank_run() {
    check_tensor_parallel("tied", &twelve_heads(), &options());
    let spec = Gpt2 {
        tied: false,
        dropout: 0.2,
        logits: Logits::Kept,
        mlp_hidden: Hidden::Recomputed,
        ..twelve_heads()
    };
    let options = TrainOptions { accumulation: 3, ..options() };
    check_tensor_parallel("untied, kept, recomputed, dropout, accumulation", &spec, &options);
}
