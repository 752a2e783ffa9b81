//! Each layer alone: N ranks give the y, dx and parameter gradients of one rank, and those agree
//! with finite differences.

#![allow(missing_docs, reason = "test names are claims")]

mod common;

use std::cell::Cell;
use std::collections::BTreeMap;

use common::{
    ALL_HOPS, DATA_PARALLEL, HAND_OVER, Hops, TP, TP_BLOCKING, Tokens, WORLDS, assemble,
    assert_close, on_ranks, options, pieces, try_on_ranks,
};
use rotifer::build::Builder;
use rotifer::layers::{
    AttentionSpec, Dropout, Hidden, Linear, Mlp, MlpKind, NormLayer, Residual, SelfAttention, Seq,
};
use rotifer::models::Model;
use rotifer::params::Init;
use rotifer::train::{TrainOptions, Trainer};
use rotifer::{Context, Layer, Result};
use rotifer_device::{Activation, Device, Dtype, Norm, Region, Write};

const WIDTH: usize = 40;
const SEQ: usize = 11;
const ROWS: usize = 7;

/// A layer between a random x and a random dy; `x += nudge * direction`.
struct Probe {
    layer: Box<dyn Layer>,
    width_out: usize,
    nudge: Cell<f32>,
    regions: [Region; 5],
}

const X: usize = 0;
const Y: usize = 1;
const DY: usize = 2;
const DX: usize = 3;
const DIRECTION: usize = 4;

impl Probe {
    fn new(layer: Box<dyn Layer>) -> Probe {
        let width_out = layer.width_out(WIDTH);
        Probe { layer, width_out, nudge: Cell::new(0.0), regions: [Region::empty(Dtype::F32); 5] }
    }

    /// Fills region `which` with numbers that depend on the place in the global batch only.
    fn fill(&self, cx: &Context<'_>, which: usize, width: usize) -> Region {
        let region = self.regions[which].first(cx.tokens() * width);
        let (stream, first) = cx.stream(1000 + which as u64, 0, width);
        cx.dev.normal(stream, first, 0.0, 1.0, region);
        region
    }
}

impl Model for Probe {
    fn build(&mut self, b: &mut Builder<'_>) -> Result<()> {
        let t = b.tokens_max();
        let widths = [WIDTH, self.width_out, self.width_out, WIDTH, WIDTH];
        self.regions = widths.map(|w| b.kept(Dtype::F32, t * w));
        b.scope(|b| self.layer.build(b, WIDTH))
    }

    fn forward(&self, cx: &Context<'_>) -> Result<()> {
        let x = self.fill(cx, X, WIDTH);
        let direction = self.fill(cx, DIRECTION, WIDTH);
        if self.nudge.get() != 0.0 {
            let mut values = vec![0.0; x.len()];
            let mut directions = values.clone();
            cx.dev.read_f32(x, &mut values);
            cx.dev.read_f32(direction, &mut directions);
            values.iter_mut().zip(directions).for_each(|(v, d)| *v += self.nudge.get() * d);
            cx.dev.write_f32(&values, x);
        }
        self.layer.forward(cx, x, self.regions[Y].first(cx.tokens() * self.width_out), Write::Set)
    }

    fn backward(&self, cx: &Context<'_>) -> Result<()> {
        let dy = self.fill(cx, DY, self.width_out);
        let [x, dx] = [X, DX].map(|i| self.regions[i].first(cx.tokens() * WIDTH));
        self.layer.backward(cx, x, dy, dx, Write::Set)
    }

    fn logits(&self, _cx: &Context<'_>, _positions: &[usize]) -> Result<Region> {
        Ok(Region::empty(Dtype::F32))
    }

    fn classes(&self) -> usize {
        SOURCE.vocab_size
    }
}

fn probe_options(hops: Hops) -> TrainOptions {
    // The loss is 0: only y and gradients are looked at.
    TrainOptions { batch: ROWS, seq: SEQ, travel_bytes_max: 2000, ..hops.with(&options()) }
}

const SOURCE: Tokens = Tokens { vocab_size: 257, seq: SEQ };

fn read(dev: &dyn Device, region: Region) -> Vec<f32> {
    let mut values = vec![0.0; region.len()];
    dev.read_f32(region, &mut values);
    values
}

/// y, dx and all gradients, of the whole batch.
fn outcome(
    ranks: usize,
    hops: Hops,
    make: &(dyn Fn() -> Box<dyn Layer> + Sync),
) -> BTreeMap<String, Vec<f32>> {
    let per_rank = on_ranks(ranks, hops.mode, |comm, dev| {
        let rank = comm.rank();
        let mut trainer = Trainer::new(dev, comm, Probe::new(make()), probe_options(hops))?;
        trainer.accumulate(&SOURCE, 0, false)?;
        let mut parts = pieces(dev, trainer.params(), |p| p.gradients);
        let slices = hops.strategy.num_slices(ranks);
        let rows = rotifer_ring::schedule::part(ROWS, slices, hops.strategy.slice(rank));
        let probe = trainer.model();
        for (name, which, width) in [("y", Y, probe.width_out), ("dx", DX, WIDTH)] {
            let values = read(dev, probe.regions[which].first(rows.len() * SEQ * width));
            parts.push((name.into(), ROWS * SEQ * width, rows.start * SEQ * width, values));
        }
        Ok(parts)
    });
    assemble(per_rank)
}

fn check(what: &str, make: &(dyn Fn() -> Box<dyn Layer> + Sync)) {
    let want = outcome(1, HAND_OVER, make);
    for hops in ALL_HOPS.into_iter().chain(DATA_PARALLEL) {
        compare(what, hops, &WORLDS, make, &want);
    }
    finite_differences(what, make);
}

/// As [`check`], and under tensor parallelism in these worlds as well.
fn check_paired(what: &str, worlds: &[usize], make: &(dyn Fn() -> Box<dyn Layer> + Sync)) {
    check(what, make);
    let want = outcome(1, HAND_OVER, make);
    for hops in [TP, TP_BLOCKING] {
        compare(what, hops, worlds, make, &want);
    }
}

/// See `assert_same_run` for the size of the tolerance; a single layer has fewer sums in a row.
fn compare(
    what: &str,
    hops: Hops,
    worlds: &[usize],
    make: &(dyn Fn() -> Box<dyn Layer> + Sync),
    want: &BTreeMap<String, Vec<f32>>,
) {
    for &ranks in worlds {
        let got = outcome(ranks, hops, make);
        assert_eq!(got.len(), want.len());
        for (name, want) in want {
            let label = format!("{what}, {ranks} ranks, {hops:?}: {name}");
            assert_close(&label, &got[name], want, 3e-6, 1e-6);
        }
    }
}

/// The derivative of `sum of y dy` along a random direction of x, and of all weights at once.
///
/// Central differences with h and h/2, joined so that only the fifth derivative is left
/// (Richardson), with h = 1/64: what remains is that, and the rounding of y, about 1e-7 sqrt(terms)
/// / h = 1e-4 of the derivative. The direction moves all weights at once, so deep layers bend a lot
/// along it.
fn finite_differences(what: &str, make: &(dyn Fn() -> Box<dyn Layer> + Sync)) {
    const H: f32 = 1.0 / 64.0;
    on_ranks(1, HAND_OVER.mode, |comm, dev| {
        let mut trainer = Trainer::new(dev, comm, Probe::new(make()), probe_options(HAND_OVER))?;
        trainer.accumulate(&SOURCE, 0, false)?;
        let dot = |a: &[f32], b: &[f32]| -> f64 {
            a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
        };
        let regions = trainer.model().regions;
        let by_x = dot(&read(dev, regions[DX]), &read(dev, regions[DIRECTION]));
        let pieces: Vec<_> = trainer.params().iter().flat_map(|p| p.pieces.clone()).collect();
        let weights: Vec<Vec<f32>> = pieces.iter().map(|p| read(dev, p.weights)).collect();
        let gradients: Vec<Vec<f32>> = pieces.iter().map(|p| read(dev, p.gradients)).collect();
        let direction = |i: usize| ((i * 7919 + 13) % 101) as f32 / 101.0 - 0.5;
        let by_w: f64 = gradients
            .iter()
            .map(|g| dot(g, &(0..g.len()).map(direction).collect::<Vec<_>>()))
            .sum();
        let mut value = |x: f32, w: f32| -> Result<f64> {
            trainer.model().nudge.set(x);
            for (piece, weights) in pieces.iter().zip(&weights) {
                let moved: Vec<f32> =
                    weights.iter().enumerate().map(|(i, v)| v + w * direction(i)).collect();
                dev.write_f32(&moved, piece.weights);
            }
            trainer.accumulate(&SOURCE, 0, false)?;
            Ok(dot(&read(dev, regions[Y]), &read(dev, regions[DY])))
        };
        let mut slope = |x: f32, w: f32| -> Result<f64> {
            let mut central = |h: f32| -> Result<f64> {
                Ok((value(h * x, h * w)? - value(-h * x, -h * w)?) / f64::from(2.0 * h))
            };
            Ok((4.0 * central(H / 2.0)? - central(H)?) / 3.0)
        };
        let (slope_x, slope_w) = (slope(1.0, 0.0)?, slope(0.0, 1.0)?);
        for (name, slope, by) in [("x", slope_x, by_x), ("weights", slope_w, by_w)] {
            let error = (slope - by).abs() / slope.abs().max(1.0);
            assert!(error < 2e-3, "{what}: along {name} {by} instead of {slope}");
        }
        Ok(())
    });
}

fn linear(name: &str, i: usize, o: usize) -> Linear {
    Linear::new(name, i, o).init(Init::Normal { std: 0.15 })
}

#[test]
fn linear_matches_one_rank() {
    check("linear", &|| Box::new(linear("l", WIDTH, 57).driven()));
    check("linear without bias", &|| Box::new(linear("l", WIDTH, 5).without_bias().driven()));
}

#[test]
fn mlp_matches_one_rank() {
    for hidden in [Hidden::Saved, Hidden::Recomputed] {
        for kind in [
            MlpKind::Plain(Activation::GeluTanh),
            MlpKind::Plain(Activation::GeluErf),
            MlpKind::Gated(Activation::Silu),
        ] {
            check_paired(&format!("{kind:?}, {hidden:?}"), &WORLDS, &|| {
                let mlp = Mlp::new("m", WIDTH, 101, kind).hidden(hidden).init_std(0.15, 0.15);
                Box::new(mlp.driven())
            });
        }
    }
}

#[test]
fn attention_matches_one_rank() {
    for (heads, kv_heads, rotary_theta) in [(5, 5, None), (6, 2, Some(10_000.0)), (3, 1, None)] {
        // Whole heads of both kinds.
        let worlds = if kv_heads == 1 { vec![1] } else { vec![1, kv_heads] };
        check_paired(&format!("{heads} heads, {kv_heads} kv heads"), &worlds, &|| {
            let spec = AttentionSpec { heads, kv_heads, head_dim: 8, rotary_theta };
            let qkv = linear("qkv", WIDTH, (heads + 2 * kv_heads) * 8);
            Box::new(SelfAttention::new("a", spec, qkv, linear("out", heads * 8, WIDTH)))
        });
    }
}

#[test]
fn combinators_match_one_rank() {
    let layer_norm = || NormLayer::new("n", WIDTH, Norm::Layer { eps: 1e-5 });
    let rms_norm = |name: &str| NormLayer::new(name, WIDTH, Norm::Rms { eps: 1e-6 });
    check("residual", &|| {
        let body = Seq::new().then(layer_norm()).then(linear("l", WIDTH, WIDTH).driven());
        Box::new(Residual::new(body))
    });
    check("residuals in a row, then a norm and a head", &|| {
        let body = |name: &str| {
            let mlp = Mlp::new(name, WIDTH, 33, MlpKind::Gated(Activation::Silu));
            Seq::new()
                .then(rms_norm(&format!("{name}.norm")))
                .then(mlp.init_std(0.15, 0.15).driven())
                .then(Dropout::new(0.1))
        };
        let stream = Seq::new().then(Residual::new(body("a"))).then(Residual::new(body("b")));
        Box::new(stream.then(layer_norm()).then(linear("head", WIDTH, 17).driven()))
    });
    check("two norms in a row", &|| {
        let seq = Seq::new().then(rms_norm("a")).then(layer_norm()).then(rms_norm("b"));
        Box::new(seq.then(linear("l", WIDTH, 9).driven()))
    });
}

#[test]
fn layers_that_share_a_unit_match_one_rank() {
    // Two uses in a row: the gradient of the first to run backward is still on its way home when
    // the second begins with the same shard.
    check("a shared linear layer", &|| {
        let shared = || linear("shared", WIDTH, WIDTH).driven();
        Box::new(Seq::new().then(shared()).then(shared()).then(shared()))
    });
}

/// An MLP with fewer hidden columns than ranks: some have no shard, and still add their share.
#[test]
fn ranks_without_a_shard_add_nothing() {
    for hidden in [Hidden::Saved, Hidden::Recomputed] {
        check_paired(&format!("2 hidden columns, {hidden:?}"), &WORLDS, &|| {
            let mlp = Mlp::new("m", WIDTH, 2, MlpKind::Gated(Activation::Silu)).hidden(hidden);
            Box::new(mlp.init_std(0.15, 0.15).driven())
        });
    }
}

/// What tensor parallelism cannot cut is refused with what to do instead.
#[test]
fn tensor_parallelism_refuses_what_it_cannot_cut() {
    let refused = |ranks, make: &(dyn Fn() -> Box<dyn Layer> + Sync)| {
        let failed = try_on_ranks(ranks, TP.mode, |comm, dev| {
            Trainer::new(dev, comm, Probe::new(make()), probe_options(TP)).map(|_| ())
        });
        failed.expect_err("refused").to_string()
    };
    let text = refused(2, &|| Box::new(linear("alone", WIDTH, 8).driven()));
    assert!(text.contains("alone: tp cuts linear layers in pairs only"), "{text}");
    let attention = || -> Box<dyn Layer> {
        let spec = AttentionSpec { heads: 6, kv_heads: 2, head_dim: 8, rotary_theta: None };
        Box::new(SelfAttention::new("a", spec, linear("q", WIDTH, 80), linear("o", 48, WIDTH)))
    };
    let text = refused(3, &attention);
    let says = "6 query and 2 key/value heads do not divide by 3 ranks; take another number of \
                ranks, or rtp, which has no such limit";
    assert!(text.contains(says), "{text}");
}

#[test]
fn impossible_structures_are_refused() {
    let message = |make: &(dyn Fn() -> Box<dyn Layer> + Sync)| {
        let comm = rotifer_ring::Comm::alone();
        let mut probe = Probe::new(make());
        let refused = rotifer::train::plan(&mut probe, &comm, &probe_options(HAND_OVER));
        refused.expect_err("an impossible structure").to_string()
    };
    let text = message(&|| Box::new(linear("odd", 41, 3).driven()));
    assert!(text.contains("odd takes 41 columns, but its input has 40"), "{text}");
    let text = message(&|| Box::new(Residual::new(Seq::new().then(linear("l", 40, 40).driven()))));
    assert!(text.contains("two parts"), "{text}");
    let text = message(&|| {
        let norm = NormLayer::new("n", WIDTH, Norm::Rms { eps: 1e-6 });
        Box::new(Residual::new(Seq::new().then(linear("l", 40, 40).driven()).then(norm)))
    });
    assert!(text.contains("cannot end in a norm"), "{text}");
    let text = message(&|| {
        let spec = AttentionSpec { heads: 1, kv_heads: 1, head_dim: 257, rotary_theta: None };
        let (qkv, out) = (linear("qkv", WIDTH, 771), linear("out", 257, WIDTH));
        Box::new(SelfAttention::new("a", spec, qkv, out))
    });
    assert!(text.contains("257 channels of a head at most 256"), "{text}");
    let text = message(&|| {
        let norm = || NormLayer::new("same", WIDTH, Norm::Rms { eps: 1e-6 });
        Box::new(Seq::new().then(norm()).then(norm()).then(linear("l", 40, 40).driven()))
    });
    assert!(text.contains("are named same.weight"), "{text}");
    let text = message(&|| {
        let one = linear("shared", WIDTH, WIDTH).driven();
        let other = linear("shared", WIDTH, WIDTH).without_bias().driven();
        Box::new(Seq::new().then(one).then(other))
    });
    assert!(text.contains("unit shared is shared by layers that disagree"), "{text}");
    let text = message(&|| {
        let norm = NormLayer::new("n", WIDTH, Norm::Rms { eps: 1e-6 });
        Box::new(Residual::new(Seq::new().then(norm).then(linear("l", 40, 39).driven())))
    });
    assert!(text.contains("40 columns to 39"), "{text}");
    let text = message(&|| {
        let spec = AttentionSpec { heads: 5, kv_heads: 2, head_dim: 8, rotary_theta: None };
        let (qkv, out) = (linear("qkv", WIDTH, 72), linear("out", 40, WIDTH));
        Box::new(SelfAttention::new("a", spec, qkv, out))
    });
    assert!(text.contains("5 query heads must be a multiple of 2"), "{text}");
}
