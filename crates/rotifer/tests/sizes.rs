//! Memory at benchmark sizes: N ranks need together what one rank needs, within 1 %. The plan is
//! counted, not allocated; `memory.rs` shows that it is the peak.

#![allow(missing_docs, reason = "test names are claims")]

mod common;

use common::{HAND_OVER, Hops, IN_PLACE, OVERLAPPED, on_ranks, options, tiny};
use rotifer::layers::{Hidden, Logits};
use rotifer::models::{Gpt2, gpt2};
use rotifer::train::{TrainOptions, plan};
use rotifer_device::{MemoryPlan, Purpose};

/// GPT-2 124M, tied.
fn gpt2_124m() -> Gpt2 {
    Gpt2 {
        vocab_size: 50_257,
        context: 1024,
        width: 768,
        layers: 12,
        heads: 12,
        mlp_width: 3072,
        init_std: 0.02,
        ..tiny()
    }
}

fn options_124m() -> TrainOptions {
    TrainOptions {
        batch: 8,
        seq: 256,
        travel_bytes_max: 4 << 20,
        verify_replicated: false,
        ..options()
    }
}

fn planned(ranks: usize, hops: Hops, spec: &Gpt2, options: &TrainOptions) -> MemoryPlan {
    let options = hops.with(options);
    on_ranks(ranks, hops.mode, |comm, _| plan(&mut gpt2(spec), &comm, &options))[0]
}

/// Asserts `peak(N) N / peak(1) <= 1.01`, counting everything.
fn check(what: &str, hops: Hops, spec: &Gpt2, options: &TrainOptions) {
    let one = planned(1, hops, spec, options).total();
    for ranks in [2, 4, 8] {
        let all = planned(ranks, hops, spec, options).total() * ranks;
        let ratio = all as f64 / one as f64;
        assert!(ratio <= 1.01, "{what}: {ranks} ranks need {ratio:.4} of one rank's {one} bytes");
    }
}

#[test]
fn ranks_together_need_what_one_rank_needs() {
    check("handed over", HAND_OVER, &gpt2_124m(), &options_124m());
    check("in place", IN_PLACE, &gpt2_124m(), &options_124m());
    let untied = Gpt2 { tied: false, mlp_hidden: Hidden::Recomputed, ..gpt2_124m() };
    check("untied, recomputed", HAND_OVER, &untied, &options_124m());
    let kept = Gpt2 { logits: Logits::Kept, ..gpt2_124m() };
    check("kept logits", HAND_OVER, &kept, &options_124m());
}

#[test]
fn spare_shards_stay_within_the_bound_as_well() {
    // Four spares of 512 KiB are 2 MiB of some 370 per rank at N = 8.
    let options = TrainOptions { travel_bytes_max: 512 << 10, ..options_124m() };
    check("overlapped", OVERLAPPED, &gpt2_124m(), &options);
}

#[test]
fn tying_saves_one_table_with_its_gradient_and_state() {
    for ranks in [1, 4] {
        let tied = planned(ranks, HAND_OVER, &gpt2_124m(), &options_124m());
        let untied = Gpt2 { tied: false, ..gpt2_124m() };
        let untied = planned(ranks, HAND_OVER, &untied, &options_124m());
        let states = [Purpose::Weights, Purpose::Gradients, Purpose::Optimizer];
        let saved: usize = states.iter().map(|p| untied.bytes(*p) - tied.bytes(*p)).sum();
        let table = 50_257 * 768 * 4 * 4;
        // Slots are as large as the largest shard: a row more per group at most.
        assert!(saved.abs_diff(table / ranks) <= 20 * 768 * 4 * 4, "{ranks} ranks save {saved}");
        assert!(untied.bytes(Purpose::Activations) == tied.bytes(Purpose::Activations));
    }
}

#[test]
fn logits_do_not_grow_with_the_tokens() {
    let scratch = |seq| {
        let options = TrainOptions { seq, batch: 1, ..options_124m() };
        // So wide a vocabulary and so narrow a model that logits would be all there is.
        let spec = Gpt2 { width: 16, heads: 1, mlp_width: 16, layers: 1, ..gpt2_124m() };
        planned(1, HAND_OVER, &spec, &options).bytes(Purpose::Scratch)
    };
    let (short, long) = (scratch(512), scratch(1024));
    let logits_of_512_tokens = 512 * 50_257 * 4;
    assert!(long - short < logits_of_512_tokens / 50, "{short} -> {long}");
}
