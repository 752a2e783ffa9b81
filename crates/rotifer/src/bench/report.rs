//! What a benchmark found. Serialises to the JSON that `rotifer bench --json` writes: all times in
//! seconds, all sizes in bytes.

use std::collections::BTreeMap;

use rotifer_device::{KernelKind, MemoryPlan, Purpose};
use serde::Serialize;

use super::measure::{Run, Step, middle};
use super::{Options, Variant, World};
use crate::config::Config;
use crate::models::Gpt2;

/// Version of the report's fields; it grows when one changes its meaning or goes.
pub const FORMAT: u32 = 1;

/// A whole benchmark.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`FORMAT`].
    pub format: u32,
    /// Version of the crate that measured.
    pub rotifer: &'static str,
    /// Name of the config.
    pub config: String,
    /// Cores that the ranks shared.
    pub cores: usize,
    /// How often each strategy was measured on each number of ranks.
    pub rounds: usize,
    /// Steps of each measurement that did not count.
    pub warmup: usize,
    /// Steps of each measurement that counted.
    pub steps: usize,
    /// Rows of the global batch.
    pub batch: usize,
    /// Tokens per row.
    pub seq: usize,
    /// Elements of all parameters, each counted once.
    pub parameters: u64,
    /// Operations that the model itself needs per token, forward and backward: 6 per element of a
    /// matrix (a head's counts, a table that is only looked up does not), and 6 x layers x width x
    /// seq for causal attention. What is computed again in backward does not count.
    pub flops_per_token: f64,
    /// The link that was simulated, if one was.
    pub link: Option<Link>,
    /// Bytes that a single rank needs for the same batch.
    pub one_rank: Bytes,
    /// The numbers of ranks, in ascending order.
    pub worlds: Vec<WorldReport>,
    /// By number of ranks, then in the order of the strategies.
    pub rows: Vec<Row>,
}

/// A simulated link between neighbours.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Link {
    /// Gigabits per second in each direction.
    pub gbps: f64,
    /// From the end of sending to the arrival, in microseconds.
    pub latency_us: f64,
}

/// What all strategies on one number of ranks have in common.
#[derive(Clone, Debug, Serialize)]
pub struct WorldReport {
    /// Number of ranks.
    pub ranks: usize,
    /// Threads of each. Where ranks times threads exceed the cores, ranks wait for one.
    pub threads: usize,
    /// What each rank computes on; `None` if no strategy was possible.
    pub device: Option<String>,
    /// Floating-point operations per second of matrix products of the MLP's shape, all ranks at
    /// once, summed; `None` if no strategy was possible.
    pub gemm_flops_per_sec: Option<f64>,
}

/// One strategy on one number of ranks.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Number of ranks.
    pub ranks: usize,
    /// The strategy.
    pub strategy: Variant,
    /// What came of it: the field `measured` or the field `not_possible`.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// What came of measuring one strategy.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It was measured in every round.
    Measured(Box<Measured>),
    /// It is not possible, for this reason.
    NotPossible(String),
}

/// Figures of one strategy on one number of ranks.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// Target tokens of the global batch per second, over all steps of all rounds that count.
    pub tokens_per_sec: Spread,
    /// Where rank 0's time went in the step of median speed (of an even number of steps, the
    /// slower one of the two in the middle).
    pub step: Split,
    /// Bytes that rank 0 sent in that step.
    pub moved: Moved,
    /// Bytes of the rank that has most; they are all allocated before the first step.
    pub peak: Bytes,
    /// Peak times the number of ranks over the bytes of a single rank: 1 if nothing is held twice.
    pub peak_ratio: f64,
    /// Mean loss per target token in the last step: equal for all strategies within rounding, as
    /// they all train the same rows from the same weights.
    pub loss: f64,
    /// The model's operations per second (see [`Report::flops_per_token`]) over those of bare
    /// products ([`WorldReport::gemm_flops_per_sec`]).
    pub flop_utilisation: f64,
    /// Which part of the time that messages were under way on the simulated link was hidden by
    /// computing; `None` without a link.
    pub overlap_efficiency: Option<f64>,
}

/// A median and the extremes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Spread {
    /// The median: of an even number of values, the lower of the two in the middle.
    pub median: f64,
    /// The lowest.
    pub min: f64,
    /// The highest.
    pub max: f64,
}

/// The time of one step of one rank: `secs = compute + exposed + other`.
#[derive(Clone, Debug, Serialize)]
pub struct Split {
    /// The whole step.
    pub secs: f64,
    /// In kernels other than copies, sums and fills.
    pub compute_secs: f64,
    /// Waiting for other ranks, with the copies and sums of hops and collectives.
    pub exposed_secs: f64,
    /// The rest: other copies and fills, and whatever the host does between kernels.
    pub other_secs: f64,
    /// Time that messages were under way on the simulated link while the rank computed.
    pub link_hidden_secs: f64,
    /// Time that the rank slept because the simulated link had not delivered; part of
    /// `exposed_secs`.
    pub link_exposed_secs: f64,
    /// By kind of kernel. `copy` has all copies, sums and fills, those of communication too.
    pub kernels_secs: BTreeMap<String, f64>,
}

/// Bytes that a rank sends in one step.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Moved {
    /// Hops of weights or token ids, whether bytes are copied or handed over.
    pub weights: u64,
    /// Hops of gradients or rows of an embedding, likewise.
    pub gradients: u64,
    /// Its share of all collectives, were each run as a ring.
    pub collectives: u64,
}

/// Bytes of one rank by purpose (see [`Purpose`]), and their sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[expect(missing_docs, reason = "the purposes are documented where they are defined")]
pub struct Bytes {
    pub weights: u64,
    pub gradients: u64,
    pub optimizer: u64,
    pub activations: u64,
    pub travel: u64,
    pub scratch: u64,
    pub total: u64,
}

impl From<&MemoryPlan> for Bytes {
    fn from(plan: &MemoryPlan) -> Bytes {
        let bytes = |purpose| plan.bytes(purpose) as u64;
        Bytes {
            weights: bytes(Purpose::Weights),
            gradients: bytes(Purpose::Gradients),
            optimizer: bytes(Purpose::Optimizer),
            activations: bytes(Purpose::Activations),
            travel: bytes(Purpose::Travel),
            scratch: bytes(Purpose::Scratch),
            total: plan.total() as u64,
        }
    }
}

impl Report {
    pub(super) fn new(
        config: &Config,
        options: &Options,
        worlds: &[World],
        one_rank: &MemoryPlan,
        parameters: u64,
    ) -> Report {
        let link = config
            .ranks
            .link_gbps
            .map(|gbps| Link { gbps, latency_us: config.ranks.link_latency_us });
        let mut report = Report {
            format: FORMAT,
            rotifer: env!("CARGO_PKG_VERSION"),
            config: config.name().to_owned(),
            cores: options.cores,
            rounds: options.rounds,
            warmup: options.warmup,
            steps: options.steps,
            batch: config.train.batch,
            seq: config.seq(),
            parameters,
            flops_per_token: flops_per_token(&config.gpt2(), config.seq()),
            link,
            one_rank: one_rank.into(),
            worlds: worlds.iter().map(WorldReport::new).collect(),
            rows: Vec::new(),
        };
        for (world, case) in worlds.iter().flat_map(|w| w.cases.iter().map(move |c| (w, c))) {
            let outcome = match &case.runs {
                Ok(runs) => Outcome::Measured(Box::new(report.measured(world, runs))),
                Err(cause) => Outcome::NotPossible(cause.to_string()),
            };
            report.rows.push(Row { ranks: world.ranks, strategy: case.variant, outcome });
        }
        report
    }

    /// The figures of at least one run.
    fn measured(&self, world: &World, runs: &[Run]) -> Measured {
        let steps = || runs.iter().flat_map(|run| run.steps.iter().copied());
        let speeds = || steps().map(|step| step.tokens_per_sec);
        let step = middle(steps());
        let traffic = step.traffic;
        let peak = Bytes::from(&runs[0].plan);
        let gemm = world.gemm.as_ref().expect("measured wherever a strategy ran");
        let link_secs = (traffic.link_hidden + traffic.link_exposed).as_secs_f64();
        let hidden = traffic.link_hidden.as_secs_f64() / link_secs;
        Measured {
            tokens_per_sec: Spread {
                median: step.tokens_per_sec,
                min: speeds().fold(f64::INFINITY, f64::min),
                max: speeds().fold(0.0, f64::max),
            },
            step: Split::new(&step),
            moved: Moved {
                weights: traffic.weights_bytes,
                gradients: traffic.gradients_bytes,
                collectives: traffic.collectives_bytes,
            },
            peak,
            peak_ratio: peak.total as f64 * world.ranks as f64 / self.one_rank.total as f64,
            loss: runs[0].loss,
            flop_utilisation: step.tokens_per_sec * self.flops_per_token / gemm.flops_per_sec,
            // One rank sends nothing, so there is nothing to hide.
            overlap_efficiency: (self.link.is_some() && link_secs > 0.0).then_some(hidden),
        }
    }
}

impl WorldReport {
    fn new(world: &World) -> WorldReport {
        let gemm = world.gemm.as_ref();
        WorldReport {
            ranks: world.ranks,
            threads: world.threads,
            device: gemm.map(|gemm| gemm.device.clone()),
            gemm_flops_per_sec: gemm.map(|gemm| gemm.flops_per_sec),
        }
    }
}

impl Split {
    fn new(step: &Step) -> Split {
        let (compute_secs, exposed_secs) =
            (step.compute_secs(), step.traffic.exposed.as_secs_f64());
        let kernel = |kind| (format!("{kind:?}").to_lowercase(), step.kernel_secs(kind));
        Split {
            secs: step.secs,
            compute_secs,
            exposed_secs,
            // The parts do not overlap: below 0 only by rounding.
            other_secs: (step.secs - compute_secs - exposed_secs).max(0.0),
            link_hidden_secs: step.traffic.link_hidden.as_secs_f64(),
            link_exposed_secs: step.traffic.link_exposed.as_secs_f64(),
            kernels_secs: KernelKind::ALL.into_iter().map(kernel).collect(),
        }
    }
}

/// See [`Report::flops_per_token`].
fn flops_per_token(spec: &Gpt2, seq: usize) -> f64 {
    let sizes = [spec.width, spec.mlp_width, spec.layers, spec.vocab_size, seq];
    let [c, f, l, v, s] = sizes.map(|n| n as f64);
    let matrices = l * (4.0 * c * c + 2.0 * c * f) + v * c;
    6.0 * matrices + 6.0 * l * c * s
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpt2_small_needs_almost_a_gigaflop_per_token() {
        let text = "[model]\nvocab_size = 50257\ncontext = 1024\nwidth = 768\nlayers = 12\n\
                    heads = 12\n[data]\ntrain = \"x\"\n[train]\nsteps = 1\nbatch = 1\n\
                    [optimizer]\nlr = 1e-3\n";
        let config = Config::parse(text, "gpt2.toml".as_ref(), &[]).expect("a config");
        // 85.0 M elements in blocks and 38.6 M in the head, 6 operations each; attention adds
        // 6 x 12 x 768 x 1024.
        let expected = 6.0 * (84_934_656.0 + 38_597_376.0) + 56_623_104.0;
        assert_eq!(flops_per_token(&config.gpt2(), config.seq()), expected);
    }
}
