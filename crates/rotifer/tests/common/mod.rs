//! Runs models and layers on N ranks and puts what the ranks hold together again.

#![allow(dead_code, missing_docs, reason = "shared by test binaries that each use a part")]

pub mod saves;

use std::collections::BTreeMap;
use std::time::Duration;

use rotifer::layers::{EmbeddingRoute, Hidden, Logits};
use rotifer::models::{Gpt2, gpt2};
use rotifer::optim::{LrSchedule, Optimizer};
use rotifer::params::Param;
use rotifer::strategy::Strategy;
use rotifer::train::{Source, StepReport, TrainOptions, Trainer};
use rotifer::{Error, Result};
use rotifer_device::{Activation, CpuDevice, Device, Region};
use rotifer_ring::{Comm, HopMode, launch};

/// How ranks work together: the strategy, and the form of what moves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hops {
    pub strategy: Strategy,
    pub mode: HopMode,
    pub overlap: bool,
    pub reshard: bool,
}

impl Hops {
    const fn of(strategy: Strategy, overlap: bool) -> Hops {
        Hops { strategy, mode: HopMode::HandOver, overlap, reshard: true }
    }

    /// These options, to be run so.
    pub fn with(self, options: &TrainOptions) -> TrainOptions {
        TrainOptions {
            strategy: self.strategy,
            overlap: self.overlap,
            reshard_after_forward: self.reshard,
            ..options.clone()
        }
    }
}

pub const HAND_OVER: Hops = Hops::of(Strategy::Rtp, true);
pub const OVERLAPPED: Hops = Hops { mode: HopMode::Copy, ..HAND_OVER };
pub const IN_PLACE: Hops = Hops { overlap: false, ..OVERLAPPED };
pub const ALL_HOPS: [Hops; 4] =
    [HAND_OVER, Hops { overlap: false, ..HAND_OVER }, OVERLAPPED, IN_PLACE];
pub const DDP: Hops = Hops::of(Strategy::Ddp, true);
pub const ZERO1: Hops = Hops::of(Strategy::Zero1, true);
pub const FSDP: Hops = Hops::of(Strategy::Fsdp, true);
pub const FSDP_KEPT: Hops = Hops { reshard: false, ..FSDP };
/// Those that see a slice of the batch each, each with and without overlap.
pub const DATA_PARALLEL: [Hops; 8] = [
    DDP,
    Hops::of(Strategy::Ddp, false),
    ZERO1,
    Hops::of(Strategy::Zero1, false),
    FSDP,
    Hops::of(Strategy::Fsdp, false),
    FSDP_KEPT,
    Hops { overlap: false, ..FSDP_KEPT },
];
pub const TP: Hops = Hops::of(Strategy::Tp, true);
pub const TP_BLOCKING: Hops = Hops::of(Strategy::Tp, false);

/// One of each strategy beside rtp, with overlap.
pub const OTHERS: [Hops; 5] = [DDP, ZERO1, FSDP, FSDP_KEPT, TP];

impl Hops {
    /// Of [`WORLDS`], those that share `heads` heads as this strategy needs; under tensor
    /// parallelism also the world of one head each.
    pub fn worlds(self, heads: usize) -> Vec<usize> {
        if self.strategy != Strategy::Tp {
            return WORLDS.into();
        }
        let mut worlds: Vec<usize> = WORLDS.into_iter().chain([heads]).collect();
        worlds.retain(|ranks| heads.is_multiple_of(*ranks));
        worlds.dedup();
        worlds
    }
}

/// Worlds that faults have hidden in: none, even, odd, more than two, more than shards divide by.
pub const WORLDS: [usize; 5] = [1, 2, 3, 4, 7];

/// Runs `f` on every rank and returns what the ranks return, by rank.
pub fn on_ranks<T: Send>(
    ranks: usize,
    mode: HopMode,
    f: impl Fn(Comm, &dyn Device) -> Result<T> + Sync,
) -> Vec<T> {
    try_on_ranks(ranks, mode, f).unwrap_or_else(|e| panic!("{ranks} ranks, {mode:?}: {e}"))
}

pub fn try_on_ranks<T: Send>(
    ranks: usize,
    mode: HopMode,
    f: impl Fn(Comm, &dyn Device) -> Result<T> + Sync,
) -> std::result::Result<Vec<T>, launch::Failure<Error>> {
    let options = launch::Options {
        hop_mode: mode,
        deadline: Duration::from_secs(20),
        ..launch::Options::new(ranks)
    };
    launch::threads(&options, |comm| CpuDevice::run(1, |dev| f(comm, dev))?)
}

/// Tokens that are a function of the row, some rows ending in targets to be ignored.
pub struct Tokens {
    pub vocab_size: usize,
    pub seq: usize,
}

impl Source for Tokens {
    fn num_targets(&self, row: u64) -> usize {
        // 0 to 4 ignored: no two micro-batches have the same number of targets.
        self.seq - (row % 5) as usize
    }

    fn fill(
        &self,
        row: u64,
        inputs: &mut [i32],
        targets: &mut [i32],
        documents: Option<&mut [i32]>,
    ) {
        let token = |i: usize| {
            let z = (row * 1_000_003 + i as u64 + 17).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            // Some structure, so that there is something to learn.
            ((z >> 33) % 7 * (self.vocab_size as u64 / 7) + i as u64 % 3) as i32
        };
        for i in 0..self.seq {
            inputs[i] = token(i);
            targets[i] = if i < self.num_targets(row) { token(i + 1) } else { -1 };
        }
        if let Some(documents) = documents {
            for (i, d) in documents.iter_mut().enumerate() {
                *d = i32::from(i > self.seq / 3);
            }
        }
    }
}

/// Sizes that divide by nothing: 5 heads, width 40, vocabulary 257, MLP 100.
pub fn tiny() -> Gpt2 {
    Gpt2 {
        vocab_size: 257,
        context: 24,
        width: 40,
        layers: 2,
        heads: 5,
        mlp_width: 100,
        activation: Activation::GeluTanh,
        tied: true,
        dropout: 0.0,
        mlp_hidden: Hidden::Saved,
        logits: Logits::Recomputed,
        embedding: EmbeddingRoute::Fewest,
        // Larger than usual, so that errors show.
        init_std: 0.1,
    }
}

pub fn options() -> TrainOptions {
    TrainOptions {
        strategy: Strategy::Rtp,
        batch: 7,
        accumulation: 1,
        seq: 19,
        seed: 42,
        clip_norm: Some(1.0),
        optimizer: Optimizer::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 },
        schedule: LrSchedule::constant(3e-3),
        overlap: true,
        reshard_after_forward: true,
        // Small enough that the table and the MLP rotate in groups.
        travel_bytes_max: 4096,
        documents: false,
        logits_rows: 0,
        verify_replicated: true,
        train: true,
    }
}

/// What a run shows: gradients of the first batch, then a training curve, then the weights.
#[derive(Debug)]
pub struct Outcome {
    pub first: StepReport,
    pub gradients: BTreeMap<String, Vec<f32>>,
    pub reports: Vec<StepReport>,
    pub weights: BTreeMap<String, Vec<f32>>,
    pub evaluated: f64,
}

/// Trains `spec` for `steps` steps on N ranks.
pub fn train(ranks: usize, hops: Hops, spec: &Gpt2, options: &TrainOptions, steps: u64) -> Outcome {
    let options = hops.with(options);
    let tokens = Tokens { vocab_size: spec.vocab_size, seq: options.seq };
    let batch = options.batch as u64;
    let per_rank = on_ranks(ranks, hops.mode, |comm, dev| {
        let mut probe = Trainer::new(dev, comm.clone(), gpt2(spec), options.clone())?;
        let first = probe.accumulate(&tokens, 0, false)?;
        let gradients = pieces(dev, probe.params(), |p| p.gradients);
        let mut trainer = Trainer::new(dev, comm, gpt2(spec), options.clone())?;
        let reports = (0..steps).map(|s| trainer.step(&tokens, s * batch, false));
        let reports = reports.collect::<Result<Vec<_>>>()?;
        let evaluated = trainer.evaluate(&tokens, 2 * batch + 3)?;
        let weights = pieces(dev, trainer.params(), |p| p.weights);
        Ok((first, gradients, reports, weights, evaluated))
    });
    let (mut gradients, mut weights) = (Vec::new(), Vec::new());
    let (mut first, mut reports, mut evaluated) = (None, Vec::new(), 0.0);
    for (f, g, r, w, e) in per_rank {
        assert!(first.is_none_or(|first| first == f), "ranks report the same");
        assert!(reports.is_empty() || reports == r, "ranks report the same");
        (first, reports, evaluated) = (Some(f), r, e);
        gradients.push(g);
        weights.push(w);
    }
    Outcome {
        first: first.expect("at least one rank"),
        gradients: assemble(gradients),
        reports,
        weights: assemble(weights),
        evaluated,
    }
}

/// One rank's part of a tensor: name, elements of the whole, first element, values.
pub type Part = (String, usize, usize, Vec<f32>);

pub fn pieces(
    dev: &dyn Device,
    params: &[Param],
    region: impl Fn(&rotifer::params::Piece) -> Region,
) -> Vec<Part> {
    let mut parts = Vec::new();
    for param in params {
        for piece in &param.pieces {
            let region = region(piece);
            let mut values = vec![0.0; region.len()];
            dev.read_f32(region, &mut values);
            parts.push((param.name.clone(), param.len(), piece.rows.start * param.width, values));
        }
    }
    parts
}

/// Puts the parts of all ranks together; what two ranks have must be bit-equal.
pub fn assemble(ranks: Vec<Vec<Part>>) -> BTreeMap<String, Vec<f32>> {
    let mut whole: BTreeMap<String, Vec<Option<f32>>> = BTreeMap::new();
    for (name, len, start, values) in ranks.into_iter().flatten() {
        let tensor = whole.entry(name.clone()).or_insert_with(|| vec![None; len]);
        for (place, value) in tensor[start..].iter_mut().zip(values) {
            let same = place.is_none_or(|known| known.to_bits() == value.to_bits());
            assert!(same, "{name} differs between ranks");
            *place = Some(value);
        }
    }
    let missing = |name: &str| panic!("no rank has all of {name}");
    let full = |(name, values): (String, Vec<Option<f32>>)| {
        let values = values.into_iter().map(|v| v.unwrap_or_else(|| missing(&name))).collect();
        (name, values)
    };
    whole.into_iter().map(full).collect()
}

/// Asserts that two vectors differ by at most `tolerance` times the root mean square of `want`, in
/// root mean square, plus `floor`.
pub fn assert_close(what: &str, got: &[f32], want: &[f32], tolerance: f64, floor: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let rms = |it: &mut dyn Iterator<Item = f64>| {
        (it.map(|v| v * v).sum::<f64>() / got.len().max(1) as f64).sqrt()
    };
    let size = rms(&mut want.iter().map(|v| f64::from(*v)));
    let error = rms(&mut got.iter().zip(want).map(|(g, w)| f64::from(*g) - f64::from(*w)));
    assert!(error <= tolerance * size + floor, "{what}: error {error:e} of {size:e}");
}

/// Asserts that two runs are the same within the rounding of sums taken in another order.
///
/// A sum of n products of size 1 in f32 errs by about sqrt(n) 2^-24; the longest sums here
/// (classes, tokens, hidden columns) have a few hundred terms, and a gradient passes a dozen such
/// sums: 12 x sqrt(300) x 6e-8 = 1.2e-5. AdamW divides by the root of the second moment, so a
/// gradient that is all rounding (the bias of the keys has none in exact arithmetic) moves its
/// weight by up to the learning rate; losses do not feel it.
pub fn assert_same_run(what: &str, got: &Outcome, want: &Outcome) {
    let near = |name: &str, got: f64, want: f64, tolerance: f64| {
        let error = (got - want).abs() / want.abs();
        assert!(error <= tolerance, "{what}: {name} {got} instead of {want}");
    };
    near("loss", got.first.loss, want.first.loss, 2e-6);
    near("norm", got.first.grad_norm, want.first.grad_norm, 1e-6);
    assert_eq!(got.gradients.len(), want.gradients.len());
    for (name, gradient) in &want.gradients {
        let label = format!("{what}: gradient of {name}");
        assert_close(&label, &got.gradients[name], gradient, 2e-5, 1e-7);
    }
    for (got, want) in got.reports.iter().zip(&want.reports) {
        near(&format!("loss of step {}", want.step), got.loss, want.loss, 2e-5);
        near(&format!("norm of step {}", want.step), got.grad_norm, want.grad_norm, 5e-4);
        assert_eq!((got.step, got.targets, got.lr), (want.step, want.targets, want.lr));
    }
    near("evaluation", got.evaluated, want.evaluated, 5e-5);
    for (name, weights) in want.weights.iter().filter(|(name, _)| !name.ends_with("c_attn.bias")) {
        assert_close(&format!("{what}: {name}"), &got.weights[name], weights, 2e-3, 0.0);
    }
}
