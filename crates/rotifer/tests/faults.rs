//! Whatever fails in training ends all ranks soon, names its first cause, and leaves no weight half
//! updated.

#![allow(missing_docs, reason = "test names are claims")]

mod common;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{
    ALL_HOPS, DDP, FSDP, HAND_OVER, Hops, IN_PLACE, OTHERS, OVERLAPPED, TP, Tokens, ZERO1,
    on_ranks, options, pieces, tiny, try_on_ranks,
};
use rotifer::build::Builder;
use rotifer::layers::{Embedding, IdSource, LmHead, Mlp, MlpKind, NormLayer, Residual, Seq};
use rotifer::models::{Decoder, gpt2};
use rotifer::params::Param;
use rotifer::train::{Source, StepReport, TrainOptions, Trainer};
use rotifer::{Context, Error, Layer, Phase, Result};
use rotifer_device::{Activation, CpuDevice, Norm, Region, Write};
use rotifer_ring::launch::{self, Failure};
use rotifer_ring::schedule::Pass;

/// The deadline of `common`'s runs is 20 s: what is found at once takes less than half of it.
const SOON: Duration = Duration::from_secs(10);

fn tokens() -> Tokens {
    Tokens { vocab_size: tiny().vocab_size, seq: options().seq }
}

/// What a comparison of NaNs can see.
fn bits(parts: &[common::Part]) -> Vec<u32> {
    parts.iter().flat_map(|(_, _, _, values)| values.iter().map(|v| v.to_bits())).collect()
}

/// After a good step and `plant`, every rank must refuse the next step because of `what`, with its
/// weights as they were; and what a step after that gives is returned.
fn check_not_finite(
    ranks: usize,
    hops: Hops,
    what: &str,
    model: impl Fn() -> Decoder + Sync,
    plant: impl Fn(&Trainer<'_, Decoder>) + Sync,
) -> Vec<Result<StepReport>> {
    let options = hops.with(&options());
    let results = on_ranks(ranks, hops.mode, |comm, dev| {
        let mut trainer = Trainer::new(dev, comm, model(), options.clone())?;
        trainer.step(&tokens(), 0, false)?;
        plant(&trainer);
        let before = bits(&pieces(dev, trainer.params(), |p| p.weights));
        let error = trainer.step(&tokens(), 7, false).expect_err("a step that must be refused");
        let after = bits(&pieces(dev, trainer.params(), |p| p.weights));
        Ok((error, before, after, trainer.step(&tokens(), 7, false)))
    });
    let label = format!("{ranks} ranks, {hops:?}");
    let check = |(error, before, after, again)| {
        let Error::NotFinite { step: 1, what: found, .. } = error else {
            panic!("{label}: {error}")
        };
        assert_eq!(found, what, "{label}");
        assert!(before == after, "{label}: a weight has changed");
        again
    };
    results.into_iter().map(check).collect()
}

#[test]
fn a_weight_that_is_no_number_changes_no_other() {
    let check = |ranks, hops, rank, value| {
        let again = check_not_finite(
            ranks,
            hops,
            "loss",
            || gpt2(&tiny()),
            |trainer| {
                if trainer.comm().rank() == rank {
                    let is_it = |p: &&Param| p.name == "transformer.h.0.mlp.c_fc.weight";
                    let mlp = trainer.params().iter().find(is_it).expect("an MLP");
                    trainer.device().write_f32(&[value], mlp.pieces[0].weights.slice(3..4));
                }
            },
        );
        assert!(again.iter().all(Result::is_err), "the weight is still there");
    };
    for hops in ALL_HOPS {
        check(3, hops, 1, f32::NAN);
    }
    for (ranks, rank) in [(1, 0), (2, 1), (4, 3), (7, 0)] {
        check(ranks, HAND_OVER, rank, f32::NAN);
    }
    for hops in OTHERS {
        // As many ranks as heads, under tensor parallelism.
        check(if hops == TP { 5 } else { 3 }, hops, 1, f32::NAN);
    }
}

#[test]
fn a_gradient_that_is_not_finite_changes_no_weight() {
    let check = |ranks, hops, rank, value: f32| {
        let model = || {
            let once = Cell::new(true);
            one_mlp(move |cx, pass, dy| {
                if pass == Pass::Backward && is_here(cx, rank) && once.take() {
                    cx.dev.write_f32(&[value], dy.slice(3..4));
                }
            })
        };
        for again in check_not_finite(ranks, hops, "gradient norm", model, |_| ()) {
            assert!(again.expect("nothing of it is left").grad_norm.is_finite());
        }
    };
    for hops in [HAND_OVER, OVERLAPPED, IN_PLACE] {
        check(3, hops, 2, f32::NAN);
    }
    for (ranks, rank) in [(1, 0), (2, 0), (4, 1), (7, 6)] {
        check(ranks, HAND_OVER, rank, f32::INFINITY);
    }
    for hops in OTHERS {
        for (ranks, rank) in [(1, 0), (2, 1), (3, 2), (7, 4)] {
            check(ranks, hops, rank, f32::NAN);
        }
    }
}

/// Under tensor parallelism nothing sums the gradients of replicated parameters: what is not finite
/// in one rank's alone must keep the others from going on as well.
#[test]
fn a_replicated_gradient_that_is_not_finite_on_one_rank_stops_all() {
    for rank in 0..3 {
        let model = || {
            let once = Cell::new(true);
            first_is(move |cx, pass, dy| {
                if pass == Pass::Backward && is_here(cx, rank) && once.take() {
                    cx.dev.write_f32(&[f32::NAN], dy.slice(3..4));
                }
            })
        };
        for again in check_not_finite(3, TP, "gradient norm", model, |_| ()) {
            assert!(again.expect("nothing of it is left").grad_norm.is_finite());
        }
    }
}

/// Changes `name` on one rank. All ranks must name it, and the first rank that differs from rank 0.
fn check_diverged(ranks: usize, hops: Hops, changed: usize, name: &str) {
    let options = hops.with(&options());
    let errors = on_ranks(ranks, hops.mode, |comm, dev| {
        let mut trainer = Trainer::new(dev, comm, gpt2(&tiny()), options.clone())?;
        trainer.step(&tokens(), 0, false)?;
        if trainer.comm().rank() == changed {
            let param = trainer.params().iter().find(|p| p.name == name).expect("a parameter");
            assert!(param.replicated, "{name} is on all ranks");
            let last = param.len() - 1;
            dev.write_f32(&[1.5], param.pieces[0].weights.slice(last..last + 1));
        }
        Ok(trainer.step(&tokens(), 7, false).expect_err("ranks that differ"))
    });
    for error in errors {
        let Error::Diverged { step: 1, tensor, rank } = &error else { panic!("{error}") };
        assert_eq!((tensor.as_str(), *rank), (name, changed.max(1)), "{ranks} ranks");
        let says = format!("{name} of rank {rank} differs from rank 0's");
        assert!(error.to_string().contains(&says), "{error}");
    }
}

#[test]
fn a_replicated_parameter_that_differs_is_named() {
    check_diverged(2, HAND_OVER, 1, "transformer.h.1.ln_2.bias");
    check_diverged(3, HAND_OVER, 2, "transformer.ln_f.weight");
    check_diverged(4, HAND_OVER, 1, "transformer.h.0.mlp.c_proj.bias");
    // Rank 0 is what the others are compared with.
    check_diverged(7, HAND_OVER, 0, "transformer.h.0.ln_1.weight");
    for hops in OTHERS {
        check_diverged(if hops == TP { 5 } else { 3 }, hops, 2, "transformer.h.0.ln_1.weight");
    }
    // Here every parameter is on all ranks.
    check_diverged(3, DDP, 1, "transformer.h.1.mlp.c_fc.weight");
}

/// Trains for two steps, then `end` takes over on rank 1 while the others go on.
fn fails(
    ranks: usize,
    hops: Hops,
    end: impl Fn(&mut Trainer<'_, Decoder>) -> Result<()> + Sync,
) -> Failure<Error> {
    let begin = Instant::now();
    let options = hops.with(&options());
    let failure = try_on_ranks(ranks, hops.mode, |comm, dev| {
        let mut trainer = Trainer::new(dev, comm, gpt2(&tiny()), options.clone())?;
        for step in 0..2 {
            trainer.step(&tokens(), step * 7, false)?;
        }
        if trainer.comm().rank() == 1 {
            return end(&mut trainer);
        }
        // More than can be done without rank 1.
        (2..100).try_for_each(|step| trainer.step(&tokens(), step * 7, false).map(|_| ()))
    });
    assert!(begin.elapsed() < SOON, "{ranks} ranks end at once");
    failure.expect_err("a run without rank 1")
}

#[test]
fn an_error_of_one_rank_ends_all_and_comes_first() {
    for hops in ALL_HOPS.into_iter().chain(OTHERS) {
        let worlds = if hops == TP { &[5][..] } else { &[2, 3, 4, 7] };
        for &ranks in worlds {
            let planted = |_: &mut Trainer<'_, _>| Err(Error::Shape { what: "planted".into() });
            let failure = fails(ranks, hops, planted);
            assert_eq!(failure.to_string(), "rank 1: planted", "{ranks} ranks, {hops:?}");
            assert!(matches!(failure, Failure::Failed { rank: 1, cause: Error::Shape { .. } }));
        }
    }
}

/// Good tokens until a row that panics.
struct Bomb(u64);

impl Source for Bomb {
    fn num_targets(&self, row: u64) -> usize {
        tokens().num_targets(row)
    }

    fn fill(&self, row: u64, inputs: &mut [i32], targets: &mut [i32], d: Option<&mut [i32]>) {
        assert!(row < self.0, "row {row} cannot be read");
        tokens().fill(row, inputs, targets, d);
    }
}

#[test]
fn a_panic_of_one_rank_ends_all_and_comes_first() {
    let rotated = [(2, HAND_OVER), (3, OVERLAPPED), (4, IN_PLACE), (7, HAND_OVER)];
    let others = OTHERS.map(|hops| (if hops == TP { 5 } else { 3 }, hops));
    for (ranks, hops) in rotated.into_iter().chain(others) {
        let failure = fails(ranks, hops, |trainer| trainer.step(&Bomb(14), 14, false).map(|_| ()));
        let Failure::Panicked { rank: 1, message } = &failure else { panic!("{failure}") };
        assert!(message.contains("cannot be read"), "{message}");
        assert!(failure.to_string().starts_with("rank 1 panicked: row "), "{failure}");
    }
}

#[test]
fn a_rank_that_ends_early_is_named() {
    for ranks in [2, 3, 7] {
        let failure = fails(ranks, HAND_OVER, |_| Ok(()));
        assert!(failure.to_string().contains("rank 1 has ended, but is waited for"), "{failure}");
    }
}

/// A layer and what happens on a rank just before it runs: given x in forward and dy in backward.
struct Meddled<L, F> {
    layer: L,
    before: F,
}

impl<L: Layer, F: Fn(&Context<'_>, Pass, Region)> Layer for Meddled<L, F> {
    fn width_out(&self, width_in: usize) -> usize {
        self.layer.width_out(width_in)
    }

    fn build(&mut self, b: &mut Builder<'_>, width_in: usize) -> Result<()> {
        self.layer.build(b, width_in)
    }

    fn forward(&self, cx: &Context<'_>, x: Region, y: Region, write: Write) -> Result<()> {
        (self.before)(cx, Pass::Forward, x);
        self.layer.forward(cx, x, y, write)
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        x: Region,
        dy: Region,
        dx: Region,
        write: Write,
    ) -> Result<()> {
        (self.before)(cx, Pass::Backward, dy);
        self.layer.backward(cx, x, dy, dx, write)
    }

    fn runs_in_place(&self) -> bool {
        self.layer.runs_in_place()
    }
}

/// Whether this is rank `rank` in the second step.
fn is_here(cx: &Context<'_>, rank: usize) -> bool {
    cx.comm().rank() == rank && cx.phase == Phase::Train { step: 1 }
}

/// A decoder of one MLP, with `before` to happen before it.
fn one_mlp(before: impl Fn(&Context<'_>, Pass, Region) + 'static) -> Decoder {
    let (vocab_size, width) = (tiny().vocab_size, 40);
    let norm = |name: &str| NormLayer::new(name, width, Norm::Layer { eps: 1e-5 });
    let mlp = Mlp::new("h.0.mlp", width, 100, MlpKind::Plain(Activation::GeluTanh));
    let layer = Residual::new(Seq::new().then(norm("ln_1")).then(mlp.driven()));
    let embedding = Embedding::new("wte", vocab_size, width, 0.02, IdSource::Tokens);
    let head = LmHead::new("lm_head", vocab_size, width, 0.02);
    let body = Seq::new().then(Meddled { layer, before });
    Decoder::new(vec![embedding], body, norm("ln_f"), head)
}

/// A decoder whose first layer is a norm, with `before` to happen before it: behind its gradient
/// only the table's is computed.
fn first_is(before: impl Fn(&Context<'_>, Pass, Region) + 'static) -> Decoder {
    let (vocab_size, width) = (tiny().vocab_size, 40);
    let norm = |name: &str| NormLayer::new(name, width, Norm::Layer { eps: 1e-5 });
    let embedding = Embedding::new("wte", vocab_size, width, 0.02, IdSource::Tokens);
    let head = LmHead::new("lm_head", vocab_size, width, 0.02);
    let body = Seq::new().then(Meddled { layer: norm("ln_0"), before });
    Decoder::new(vec![embedding], body, norm("ln_f"), head)
}

/// Rank 1 stops before the MLP of the second step, in one pass, until another has noticed. Of two
/// ranks the other one says where it waits; of four, whichever is first names rank 1 all the same,
/// though its own neighbour may be another.
fn check_silent(silent_in: Pass, hops: Hops, place: &str) {
    check_silent_among(2, silent_in, hops, &format!("{place}, "));
    check_silent_among(4, silent_in, hops, "unit ");
}

fn check_silent_among(ranks: usize, silent_in: Pass, hops: Hops, place: &str) {
    let deadline = Duration::from_secs(1);
    let noticed = Arc::new(AtomicBool::new(false));
    let stop = |noticed: Arc<AtomicBool>| {
        move |cx: &Context<'_>, pass, _: Region| {
            let begin = Instant::now();
            while pass == silent_in && is_here(cx, 1) && !noticed.load(Ordering::Relaxed) {
                assert!(begin.elapsed() < SOON, "nobody notices that this rank is silent");
                sleep(Duration::from_millis(5));
            }
        }
    };
    let launched = launch::Options { hop_mode: hops.mode, deadline, ..launch::Options::new(ranks) };
    // One group per unit: the first hop of the unit, that of its step 0, is the one to miss.
    let options = TrainOptions { travel_bytes_max: 1 << 20, ..hops.with(&options()) };
    let failure = launch::threads(&launched, |comm| {
        CpuDevice::run(1, |dev| {
            let model = one_mlp(stop(noticed.clone()));
            let mut trainer = Trainer::new(dev, comm, model, options.clone())?;
            trainer.step(&tokens(), 0, false)?;
            let result = trainer.step(&tokens(), 7, false);
            noticed.store(true, Ordering::Relaxed);
            result.map(|_| ())
        })?
    });
    let failure = failure.expect_err("a rank that is silent");
    let Failure::Failed { rank, cause: Error::Ring(error) } = &failure else { panic!("{failure}") };
    assert!(!error.is_consequence(), "{error}");
    let says = failure.to_string();
    assert!(says.starts_with(&format!("rank {rank}: rank 1 is silent: {place}")), "{says}");
    assert!(says.ends_with("after 1 s"), "{says}");
}

#[test]
fn a_rank_that_is_silent_in_forward_is_named_with_unit_and_step() {
    for hops in [HAND_OVER, OVERLAPPED, IN_PLACE] {
        check_silent(Pass::Forward, hops, "unit h.0.mlp, forward step 0/2, weights");
    }
}

#[test]
fn a_rank_that_is_silent_in_backward_is_named_with_unit_and_step() {
    for hops in [HAND_OVER, IN_PLACE] {
        check_silent(Pass::Backward, hops, "unit h.0.mlp, backward step 0/2, weights");
    }
    // Through spares the head's gradient is still on its way: rank 1 has not taken rank 0's part.
    check_silent(Pass::Backward, OVERLAPPED, "unit lm_head, backward step 1/2, gradients");
}

/// Where there is no ring, all ranks meet in the collective of a unit.
#[test]
fn a_rank_that_is_silent_in_a_collective_is_named_with_its_unit() {
    let silent = |pass, hops, place: &str| {
        for ranks in [2, 4] {
            check_silent_among(ranks, pass, hops, place);
        }
    };
    silent(Pass::Forward, FSDP, "unit h.0.mlp, forward all-gather, ");
    // Its weights are there since forward; what is waited for is the gradient before.
    silent(Pass::Backward, FSDP, "unit lm_head, backward reduce-scatter, ");
    silent(Pass::Forward, TP, "unit h.0.mlp, forward all-reduce, ");
    silent(Pass::Backward, TP, "unit h.0.mlp, backward all-reduce, ");
    // Before the last bucket is complete nothing has to be waited for.
    silent(Pass::Backward, DDP, "unit wte, backward all-reduce, ");
    silent(Pass::Backward, ZERO1, "unit lm_head, backward reduce-scatter, ");
}
