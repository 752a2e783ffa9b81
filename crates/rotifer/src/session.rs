//! A whole run: data, ranks, steps, evaluation, samples, checkpoints. What the command line calls.

mod metrics;
mod saving;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rotifer_device::{CpuDevice, Device, MemoryPlan, Profile};
use rotifer_ring::{Comm, launch};
use serde::Serialize;

use crate::checkpoint::{self, Checkpoint, DataFacts};
use crate::config::Config;
use crate::data::{ByteTokenizer, Dataset, Order, Splits, StreamDecoder};
use crate::error::{Error, Result};
use crate::generate::{self, Sampling};
use crate::models::{Decoder, HfConfig, Model, gpt2};
use crate::train::{self, Source, TrainOptions, Trainer};
use metrics::Metrics;
use saving::Start;

/// What a run tells while it goes on. Called by rank 0 only.
pub trait Observer: Sync {
    /// Everything is ready; the first step comes next.
    fn started(&self, info: &RunInfo);
    /// A step is done.
    fn step(&self, line: &StepLine);
    /// The held-out loss after a step.
    fn evaluated(&self, step: u64, loss: f64);
    /// A text that the trained model wrote.
    fn sample(&self, text: &str);
}

/// What a run is.
#[derive(Clone, Debug)]
pub struct RunInfo {
    /// Number of ranks.
    pub ranks: usize,
    /// Threads of each.
    pub threads: usize,
    /// What the ranks exchange, in words.
    pub form: &'static str,
    /// Elements of all parameters, each counted once.
    pub parameters: u64,
    /// Bytes of one rank, by purpose; all ranks have the same.
    pub plan: MemoryPlan,
    /// Tokens to train on.
    pub train_tokens: u64,
    /// Tokens held out.
    pub validation_tokens: u64,
    /// Tokens of one step.
    pub step_tokens: u64,
    /// Number of steps.
    pub steps: u64,
}

/// One line of metrics, as in `metrics.jsonl`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StepLine {
    /// Number of the step, from 1.
    pub step: u64,
    /// Number of steps in all.
    pub steps: u64,
    /// Mean loss per target token, before the update.
    pub loss: f64,
    /// Norm of the whole gradient, before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Target tokens of the step over its seconds.
    pub tokens_per_sec: f64,
    /// Seconds that the step took.
    pub step_secs: f64,
    /// Bytes of one rank: all that it will ever have.
    pub peak_bytes: u64,
}

#[derive(Serialize)]
struct EvalLine {
    step: u64,
    eval_loss: f64,
}

/// What a run was.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Number of ranks.
    pub ranks: usize,
    /// Bytes of one rank, by purpose.
    pub plan: MemoryPlan,
    /// Bytes that a single rank would need for the same batch.
    pub one_rank: MemoryPlan,
    /// Steps done.
    pub steps: u64,
    /// Whether it was asked to stop early.
    pub stopped: bool,
    /// Loss of the last step.
    pub loss: f64,
    /// Held-out loss at the end, if there is held-out data and the run was not stopped.
    pub eval_loss: Option<f64>,
    /// Seconds of all steps.
    pub train_secs: f64,
    /// Rank 0's time by kind of kernel, in all steps.
    pub profile: Profile,
    /// Rank 0's time of waiting for other ranks, in all steps.
    pub waited: Duration,
    /// Where the weights are.
    pub folder: PathBuf,
}

/// Windows of a data set, in an order.
pub(crate) struct Ordered<'a> {
    pub data: &'a Dataset,
    pub seq: usize,
    pub order: Order,
}

impl Source for Ordered<'_> {
    fn num_targets(&self, row: u64) -> usize {
        self.data.num_targets(self.order.sample(row), self.seq)
    }

    fn fill(
        &self,
        row: u64,
        inputs: &mut [i32],
        targets: &mut [i32],
        documents: Option<&mut [i32]>,
    ) {
        self.data.window(self.order.sample(row), self.seq, inputs, targets, documents);
    }
}

/// Trains what `config` describes with `threads` threads per rank. When `stop` becomes true the run
/// ends after the step, with its weights saved.
///
/// # Errors
/// If the data, the output folder or the number of threads is not usable (before any training), or
/// if a rank fails.
pub fn train(
    config: &Config,
    threads: usize,
    stop: &AtomicBool,
    observer: &dyn Observer,
) -> Result<Summary> {
    run(config, None, threads, stop, observer)
}

/// Goes on with a run from `from`, one of its checkpoints or its folder, whose newest is taken. It
/// goes on in the same folder unless the config names another, which then gets a branch of it. With
/// the same number of ranks the run is, bit for bit, the one that was never interrupted.
///
/// # Errors
/// As [`train()`]; if there is no checkpoint or it is damaged, if the config or the data are not
/// those of its run, or if it has all the steps already.
pub fn resume(
    config: &Config,
    from: &Path,
    threads: usize,
    stop: &AtomicBool,
    observer: &dyn Observer,
) -> Result<Summary> {
    run(config, Some(Checkpoint::find(from)?), threads, stop, observer)
}

fn run(
    config: &Config,
    from: Option<Checkpoint>,
    threads: usize,
    stop: &AtomicBool,
    observer: &dyn Observer,
) -> Result<Summary> {
    require_threads(threads)?;
    let splits = config.open_data()?;
    let spec = config.gpt2();
    let options = config.train_options(&splits);
    let one_rank = train::plan(&mut gpt2(&spec), &Comm::alone(), &options)?;
    let tokenizer = splits.train.is_text().then_some("bytes");
    let end_of_text = splits.train.end_of_text().map(i32::cast_unsigned);
    let data = DataFacts::of(&splits.train, options.seq);
    let run = Run {
        start: Start::new(config, from, &data)?,
        data,
        config,
        splits: &splits,
        options,
        one_rank,
        hf: HfConfig::of(&spec, tokenizer, end_of_text),
        observer,
        stop,
        threads,
    };
    let outcome = launch::threads(&config.launch_options(), |comm| {
        CpuDevice::run(threads, |dev| run.rank(dev, comm, gpt2(&spec)))?
    });
    match outcome {
        Ok(mut summaries) => Ok(summaries.swap_remove(0)),
        Err(failure) => {
            // An empty folder would only be in the way of the next try.
            let _ = std::fs::remove_dir(&run.start.folder);
            Err(failure.into())
        }
    }
}

struct Run<'a> {
    config: &'a Config,
    splits: &'a Splits,
    options: TrainOptions,
    one_rank: MemoryPlan,
    hf: HfConfig,
    start: Start,
    data: DataFacts,
    observer: &'a dyn Observer,
    stop: &'a AtomicBool,
    threads: usize,
}

/// The steps of a run so far.
#[derive(Default)]
struct Done {
    steps: u64,
    /// Steps of the newest checkpoint.
    saved: u64,
    stopped: bool,
    loss: f64,
    eval_loss: Option<f64>,
    secs: f64,
    profile: Profile,
    waited: Duration,
}

impl Run<'_> {
    /// One rank's part of the run.
    fn rank(&self, dev: &dyn Device, comm: Comm, model: Decoder) -> Result<Summary> {
        let mut trainer = Trainer::new(dev, comm, model, self.options.clone())?;
        let first = trainer.comm().rank() == 0;
        self.start.restore(&mut trainer)?;
        let (folder, logged) = (&self.start.folder, self.start.logged());
        let mut metrics = if first { Some(Metrics::open(folder, logged)?) } else { None };
        if first {
            self.hf.write(folder)?;
            self.observer.started(&self.info(&trainer));
        }
        let mut done =
            Done { steps: self.start.steps(), saved: self.start.logged(), ..Done::default() };
        let ended = self.steps(&mut trainer, metrics.as_mut(), &mut done);
        // A loss that is not finite has changed no weight: what was learnt before it is kept.
        if matches!(ended, Ok(()) | Err(Error::NotFinite { .. })) {
            self.save_end(&trainer, done.steps, done.saved)?;
        }
        ended?;
        if !done.stopped {
            // Behind the saving, so that an impatient second Ctrl-C loses nothing.
            done.eval_loss = self.evaluate(&mut trainer, done.steps, metrics.as_mut())?;
            self.sample(&mut trainer)?;
        }
        Ok(Summary {
            ranks: trainer.comm().world(),
            plan: *trainer.plan(),
            one_rank: self.one_rank,
            steps: done.steps,
            stopped: done.stopped,
            loss: done.loss,
            eval_loss: done.eval_loss,
            train_secs: done.secs,
            profile: done.profile,
            waited: done.waited,
            folder: self.start.folder.clone(),
        })
    }

    fn steps<M: Model>(
        &self,
        trainer: &mut Trainer<'_, M>,
        mut metrics: Option<&mut Metrics>,
        done: &mut Done,
    ) -> Result<()> {
        let (train, seq) = (&self.config.train, self.options.seq);
        let windows = self.splits.train.num_windows(seq);
        let order = Order::new(windows, train.seed, self.config.data.shuffle);
        let source = Ordered { data: &self.splits.train, seq, order };
        let batch = self.options.batch as u64;
        if self.start.owes_evaluation {
            self.evaluate(trainer, done.steps, metrics.as_deref_mut())?;
        }
        while done.steps < train.steps && !done.stopped {
            let begin = Instant::now();
            let before = (trainer.device().profile(), trainer.comm().traffic().exposed);
            let stop = self.stop.load(Ordering::Relaxed);
            let report = trainer.step(&source, done.steps * batch, stop)?;
            let step_secs = begin.elapsed().as_secs_f64();
            done.steps += 1;
            done.secs += step_secs;
            let profile = trainer.device().profile();
            done.waited += trainer.comm().traffic().exposed - before.1;
            for (sum, (after, before)) in done.profile.iter_mut().zip(profile.iter().zip(before.0))
            {
                *sum += *after - before;
            }
            done.loss = report.loss;
            done.stopped = report.stop && done.steps < train.steps;
            if let Some(metrics) = &mut metrics {
                let line = StepLine {
                    step: done.steps,
                    steps: train.steps,
                    loss: report.loss,
                    grad_norm: report.grad_norm,
                    lr: report.lr,
                    tokens_per_sec: report.targets as f64 / step_secs,
                    step_secs,
                    peak_bytes: trainer.plan().total() as u64,
                };
                if done.steps.is_multiple_of(train.log_every) || done.steps == train.steps {
                    metrics.write(&line)?;
                    self.observer.step(&line);
                }
            }
            let due = train.eval_every > 0 && done.steps.is_multiple_of(train.eval_every);
            if due && done.steps < train.steps && !done.stopped {
                self.evaluate(trainer, done.steps, metrics.as_deref_mut())?;
            }
            if self.save_due(done.steps) {
                // Behind the evaluation, which would be missing if the run were killed in it.
                self.save_step(trainer, done.steps)?;
                done.saved = done.steps;
            }
        }
        Ok(())
    }

    fn evaluate<M: Model>(
        &self,
        trainer: &mut Trainer<'_, M>,
        step: u64,
        metrics: Option<&mut Metrics>,
    ) -> Result<Option<f64>> {
        let Some(data) = &self.splits.validation else { return Ok(None) };
        let (seq, batch) = (self.options.seq, self.options.batch as u64);
        let windows = data.num_windows(seq);
        let rows = match self.config.train.eval_batches {
            0 => windows,
            batches => windows.min(batches.saturating_mul(batch)),
        };
        let source = Ordered { data, seq, order: Order::new(windows, 0, false) };
        let eval_loss = trainer.evaluate(&source, rows)?;
        if let Some(metrics) = metrics {
            metrics.write(&EvalLine { step, eval_loss })?;
            self.observer.evaluated(step, eval_loss);
        }
        Ok(Some(eval_loss))
    }

    fn sample<M: Model>(&self, trainer: &mut Trainer<'_, M>) -> Result<()> {
        let Some(sample) = self.config.sample.as_ref().filter(|_| self.options.logits_rows > 0)
        else {
            return Ok(());
        };
        let sampling = Sampling {
            tokens: sample.tokens,
            temperature: sample.temperature,
            top_p: sample.top_p.unwrap_or(1.0),
            seed: self.config.train.seed,
            end_of_text: Some(ByteTokenizer::END_OF_TEXT),
        };
        let prompts = [prompt_tokens(&sample.prompt)];
        let texts = generate::generate(trainer, &prompts, &sampling, |_, _| ())?;
        if trainer.comm().rank() == 0 {
            self.observer.sample(&ByteTokenizer::decode(&texts[0]));
        }
        Ok(())
    }

    fn info<M: Model>(&self, trainer: &Trainer<'_, M>) -> RunInfo {
        let tokens = |data: &Dataset| data.len_tokens();
        RunInfo {
            ranks: trainer.comm().world(),
            threads: self.threads,
            form: self.options.form(trainer.comm().world(), trainer.comm().hop_mode()),
            parameters: trainer.params().iter().map(|p| p.len() as u64).sum(),
            plan: *trainer.plan(),
            train_tokens: tokens(&self.splits.train),
            validation_tokens: self.splits.validation.as_ref().map_or(0, tokens),
            step_tokens: (self.options.batch * self.options.seq) as u64,
            steps: self.config.train.steps,
        }
    }
}

/// Makes the output folder: the one that the config names, which must be new or empty, or the first
/// of `runs/NAME`, `runs/NAME-2`, .. that is.
fn claim_folder(config: &Config) -> Result<PathBuf> {
    if let Some(path) = &config.train.out {
        return if claim(path)? {
            Ok(path.clone())
        } else {
            Err(Error::Exists { path: path.clone() })
        };
    }
    let mut number = 1;
    loop {
        let name = match number {
            1 => config.name().to_owned(),
            n => format!("{}-{n}", config.name()),
        };
        let path = Path::new("runs").join(name);
        if claim(&path)? {
            return Ok(path);
        }
        number += 1;
    }
}

/// Whether the folder is ours: it was empty or did not exist.
fn claim(path: &Path) -> Result<bool> {
    let io = |source| Error::Io { action: "create folder", path: path.into(), source };
    if path.exists() {
        return Ok(std::fs::read_dir(path).map_err(io)?.next().is_none());
    }
    std::fs::create_dir_all(path).map_err(io)?;
    Ok(true)
}

/// An empty prompt starts where a document starts: behind the end of another.
fn prompt_tokens(prompt: &str) -> Vec<i32> {
    let tokens = ByteTokenizer::encode(prompt);
    if tokens.is_empty() { vec![ByteTokenizer::END_OF_TEXT] } else { tokens }
}

/// How to continue prompts.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Texts to continue.
    pub prompts: Vec<String>,
    /// How the tokens are chosen; the tokenizer says which of them ends a text.
    pub sampling: Sampling,
    /// Number of ranks.
    pub ranks: usize,
    /// Threads of each.
    pub threads: usize,
}

impl GenerateOptions {
    fn check(&self) -> Result<()> {
        if self.prompts.is_empty() {
            let what = "there is no prompt to continue; give one, which may be empty".into();
            return Err(Error::Shape { what });
        }
        require_threads(self.threads)?;
        self.sampling.check()
    }
}

fn require_threads(threads: usize) -> Result<()> {
    if threads == 0 {
        let what = "a rank cannot run on 0 threads; ask for 1 or more".into();
        return Err(Error::Shape { what });
    }
    Ok(())
}

/// Continues prompts with the model in `folder`. `on_text(prompt, text)` gets each bit of new text
/// as soon as it is there. Returns prompts and continuations.
///
/// # Errors
/// If the folder holds no model that can be read, it was not trained on bytes, there is no prompt,
/// the sampling is out of range, or a rank fails.
pub fn generate(
    folder: &Path,
    options: &GenerateOptions,
    on_text: &(dyn Fn(usize, &str) + Sync),
) -> Result<Vec<String>> {
    let path = folder.join(checkpoint::CONFIG);
    let hf = HfConfig::read(&path)?;
    let spec = hf.model(&path)?;
    if hf.rotifer_tokenizer.as_deref() != Some("bytes") {
        let what = "says no rotifer_tokenizer: only models of bytes can be prompted with text yet";
        return Err(Error::Checkpoint { path, what: what.into() });
    }
    options.check()?;
    hf.require_weights(folder)?;
    let sampling = Sampling { end_of_text: Some(ByteTokenizer::END_OF_TEXT), ..options.sampling };
    let prompts: Vec<Vec<i32>> = options.prompts.iter().map(|p| prompt_tokens(p)).collect();
    let train = TrainOptions {
        batch: prompts.len(),
        logits_rows: prompts.len().div_ceil(options.ranks.max(1)),
        ..TrainOptions::for_sampling(spec.context)
    };
    let launched = launch::threads(&launch::Options::new(options.ranks), |comm| {
        CpuDevice::run(options.threads, |dev| {
            let mut trainer = Trainer::new(dev, comm, gpt2(&spec), train.clone())?;
            checkpoint::load(&trainer, folder)?;
            let first = trainer.comm().rank() == 0;
            let mut decoders: Vec<StreamDecoder> =
                prompts.iter().map(|_| StreamDecoder::default()).collect();
            let mut text = String::new();
            let texts = generate::generate(&mut trainer, &prompts, &sampling, |row, token| {
                text.clear();
                decoders[row].push(token, &mut text);
                if first && !text.is_empty() {
                    on_text(row, &text);
                }
            })?;
            for (row, decoder) in decoders.iter_mut().enumerate().filter(|_| first) {
                // The last token may have left a character half done.
                text.clear();
                decoder.finish(&mut text);
                if !text.is_empty() {
                    on_text(row, &text);
                }
            }
            Ok(texts)
        })?
    });
    let texts = launched?.swap_remove(0);
    Ok(texts.iter().map(|tokens| ByteTokenizer::decode(tokens)).collect())
}
