//! One measurement: ranks are started, train a few steps and end.

use std::time::{Duration, Instant};

use rotifer_device::{
    Arena, CpuDevice, Device, Dtype, KernelKind, Mat, MemoryPlan, Profile, Purpose, Stream, Write,
};
use rotifer_ring::{Comm, Traffic, launch};

use crate::config::Config;
use crate::data::{Order, Splits};
use crate::error::Result;
use crate::layer::Slices;
use crate::models::{Model, gpt2};
use crate::session::Ordered;
use crate::train::{Source, Trainer};

/// What one measurement found.
#[derive(Clone, Debug)]
pub(super) struct Run {
    /// Rank 0's steps that count.
    pub steps: Vec<Step>,
    /// Loss of the last step.
    pub loss: f64,
    /// Bytes of the rank that has most.
    pub plan: MemoryPlan,
}

/// One step of one rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub secs: f64,
    /// Target tokens of the global batch over the seconds.
    pub tokens_per_sec: f64,
    pub profile: Profile,
    pub traffic: Traffic,
}

/// How fast the ranks multiply matrices, all at once.
#[derive(Clone, Debug)]
pub(super) struct Gemm {
    pub device: String,
    /// Floating-point operations per second, summed over the ranks.
    pub flops_per_sec: f64,
}

impl Run {
    /// The median over the steps.
    pub fn tokens_per_sec(&self) -> f64 {
        middle(self.steps.iter().copied()).tokens_per_sec
    }
}

impl Step {
    /// Seconds by kind of kernel.
    pub fn kernel_secs(&self, kind: KernelKind) -> f64 {
        self.profile[kind as usize].as_secs_f64()
    }

    /// Seconds of all kernels but copies, sums and fills: those also run within hops and
    /// collectives, which are counted as communication.
    pub fn compute_secs(&self) -> f64 {
        let computes = KernelKind::ALL.into_iter().filter(|kind| *kind != KernelKind::Copy);
        computes.map(|kind| self.kernel_secs(kind)).sum()
    }
}

/// The step in the middle by speed; of an even number of steps, the slower one of the two.
pub(super) fn middle(steps: impl Iterator<Item = Step>) -> Step {
    let mut steps: Vec<Step> = steps.collect();
    steps.sort_by(|a, b| a.tokens_per_sec.total_cmp(&b.tokens_per_sec));
    steps[(steps.len() - 1) / 2]
}

/// Trains `warmup` steps, then `steps` that count, from random weights.
///
/// # Errors
/// If there is too little data for so many ranks, the model is not possible on them, or a rank
/// fails.
pub(super) fn steps(
    config: &Config,
    splits: &Splits,
    threads: usize,
    warmup: usize,
    steps: usize,
) -> Result<Run> {
    let (seq, train) = (config.seq(), &splits.train);
    train.require_windows("training", seq, config.ranks.count)?;
    let order = Order::new(train.num_windows(seq), config.train.seed, config.data.shuffle);
    let source = Ordered { data: train, seq, order };
    let (spec, options) = (config.gpt2(), config.train_options(splits));
    let mut runs = launch::threads(&config.launch_options(), |comm| {
        CpuDevice::run(threads, |dev| {
            let mut trainer = Trainer::new(dev, comm, gpt2(&spec), options.clone())?;
            rank_steps(&mut trainer, &source, warmup, steps)
        })?
    })?;
    let plan = runs.iter().map(|run| run.plan).max_by_key(MemoryPlan::total).expect("a rank");
    Ok(Run { plan, ..runs.swap_remove(0) })
}

/// One rank's part of [`steps`].
fn rank_steps<M: Model>(
    trainer: &mut Trainer<'_, M>,
    source: &dyn Source,
    warmup: usize,
    steps: usize,
) -> Result<Run> {
    let batch = trainer.options().batch as u64;
    let mut run = Run { steps: Vec::with_capacity(steps), loss: 0.0, plan: *trainer.plan() };
    for number in 0..warmup + steps {
        let before = (trainer.device().profile(), trainer.comm().traffic());
        let begin = Instant::now();
        let report = trainer.step(source, number as u64 * batch, false)?;
        let secs = begin.elapsed().as_secs_f64();
        run.loss = report.loss;
        if number >= warmup {
            let profile = trainer.device().profile();
            run.steps.push(Step {
                secs,
                tokens_per_sec: report.targets as f64 / secs,
                profile: std::array::from_fn(|kind| profile[kind] - before.0[kind]),
                traffic: difference(trainer.comm().traffic(), before.1),
            });
        }
    }
    Ok(run)
}

fn difference(after: Traffic, before: Traffic) -> Traffic {
    Traffic {
        num_hops: after.num_hops - before.num_hops,
        weights_bytes: after.weights_bytes - before.weights_bytes,
        gradients_bytes: after.gradients_bytes - before.gradients_bytes,
        collectives_bytes: after.collectives_bytes - before.collectives_bytes,
        exposed: after.exposed - before.exposed,
        link_hidden: after.link_hidden - before.link_hidden,
        link_exposed: after.link_exposed - before.link_exposed,
    }
}

/// How long one window of the product's measurement lasts, at least.
const GEMM_WINDOW: Duration = Duration::from_millis(100);
/// How many windows there are, of which the best counts.
const GEMM_WINDOWS: usize = 3;

/// Measures the product of an MLP's first matrix with the tokens of one rank, by all ranks at once:
/// what a step could reach if it were nothing but products.
///
/// # Errors
/// If there is not enough memory or a rank fails.
pub(super) fn gemm(config: &Config, threads: usize) -> Result<Gemm> {
    let rows = Slices::rows_max(config.train.batch, config.ranks.count, config.train.accumulation);
    let (t, c, f) = (rows * config.seq(), config.model.width, config.mlp_width());
    let ranks = launch::threads(&config.launch_options(), |comm| {
        CpuDevice::run(threads, |dev| {
            let mut counting = Arena::counting();
            product(&mut counting, t, c, f);
            let mut arena = Arena::live(dev, &counting.plan())?;
            let (x_tc, w_fc, y_tf) = product(&mut arena, t, c, f);
            for (stream, region) in [(0, x_tc.region), (1, w_fc.region)] {
                dev.normal(Stream { seed: 0, stream }, 0, 0.0, 1.0, region);
            }
            let multiply = || dev.matmul(x_tc, w_fc.t(), y_tf, Write::Set);
            let flops = 2.0 * t as f64 * c as f64 * f as f64;
            Ok::<_, crate::Error>((dev.name(), windows(&comm, flops, &multiply)?))
        })?
    })?;
    // Summed within a window: one rank's best moment may be that in which another one waited.
    let sum = |window: usize| ranks.iter().map(|(_, rates)| rates[window]).sum::<f64>();
    let flops_per_sec = (0..GEMM_WINDOWS).map(sum).fold(0.0, f64::max);
    Ok(Gemm { device: ranks[0].0.clone(), flops_per_sec })
}

/// The operands of `y = x w^T`: x `[t, c]`, w `[f, c]`, y `[t, f]`.
fn product(arena: &mut Arena, t: usize, c: usize, f: usize) -> (Mat, Mat, Mat) {
    let mut take = |rows, cols| {
        Mat::new(arena.take(Purpose::Activations, Dtype::F32, rows * cols), rows, cols)
    };
    (take(t, c), take(f, c), take(t, f))
}

/// Operations per second of this rank in each window; all ranks begin a window together.
fn windows(comm: &Comm, flops: f64, multiply: &dyn Fn()) -> Result<[f64; GEMM_WINDOWS]> {
    // The first product touches its memory for the first time.
    multiply();
    let mut rates = [0.0; GEMM_WINDOWS];
    for rate in &mut rates {
        comm.barrier()?;
        let begin = Instant::now();
        let mut products = 0.0;
        while begin.elapsed() < GEMM_WINDOW {
            multiply();
            products += 1.0;
        }
        *rate = products * flops / begin.elapsed().as_secs_f64();
    }
    Ok(rates)
}
