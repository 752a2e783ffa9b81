//! The training step of one rank: micro-batches, sums over ranks, clipping, the update.
//!
//! All memory is decided in [`Trainer::new`]; nothing on the step path allocates.

mod options;
mod plan;
mod resume;

use rotifer_device::{Arena, Device, Dtype, MemoryPlan, Purpose, Region};
use rotifer_ring::{Comm, schedule};

use crate::build::{Builder, Built, Counted};
use crate::error::{Error, Result};
use crate::layer::{Batch, Context, Phase, Slices};
use crate::models::Model;
use crate::params::Param;
use crate::strategy::{Driver, Strategy};
pub use options::{DEFAULT_TRAVEL_BYTES_MAX, TrainOptions};
pub use plan::{num_parameters, plan};

/// Where the rows of a batch come from. The same on every rank.
pub trait Source {
    /// Number of target tokens of a row.
    fn num_targets(&self, row: u64) -> usize;

    /// Fills one row: inputs and targets `[seq]`; a negative target is ignored. `documents`, if
    /// wanted, gets the number of the document that each token belongs to.
    fn fill(
        &self,
        row: u64,
        inputs: &mut [i32],
        targets: &mut [i32],
        documents: Option<&mut [i32]>,
    );
}

/// What one step did. The same on every rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Number of the step, from 0.
    pub step: u64,
    /// Mean loss per target token of the global batch, before the update.
    pub loss: f64,
    /// Norm of the whole gradient, before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Target tokens of the global batch.
    pub targets: u64,
    /// Whether any rank asked to stop.
    pub stop: bool,
}

/// Elements of `Trainer::scalars`.
const LOSS: usize = 0;
const SQUARES: usize = 1;
const STOP: usize = 2;
const REPLICATED_SQUARES: usize = 3;
const SCALARS: usize = 4;

/// One rank's trainer.
pub struct Trainer<'a, M> {
    dev: &'a dyn Device,
    driver: Driver,
    model: M,
    options: TrainOptions,
    plan: MemoryPlan,
    params: Vec<Param>,
    replicated_gradients: Region,
    /// A hash of each replicated tensor, of every rank: `[world, tensors]` `F64`. Empty if not
    /// wanted.
    hashes: Region,
    scalars: Region,
    /// One number per prompt, for [`sum_over_ranks`](Trainer::sum_over_ranks).
    choices: Region,
    batch: Batch,
    host: HostBatch,
    step: u64,
}

/// Staging of one micro-batch on its way to the device.
#[derive(Debug, Default)]
struct HostBatch {
    inputs: Vec<i32>,
    targets: Vec<i32>,
    documents: Vec<i32>,
    /// Replicated weights on their way back, to be hashed.
    weights: Vec<f32>,
    hashes: Vec<f64>,
}

/// What both passes of the builder yield.
struct Parts {
    built: Built,
    driver: Driver,
    batch: Batch,
    scalars: Region,
    choices: Region,
    hashes: Region,
}

/// One pass of building: the model, the step's inputs, the travel buffers.
fn build(
    model: &mut dyn Model,
    arena: &mut Arena,
    comm: &Comm,
    options: &TrainOptions,
    counted: Option<Counted>,
) -> Result<Parts> {
    let build_options = options.build_options(comm.world());
    let mut b = Builder::new(arena, comm, build_options, counted);
    let t = b.tokens_max();
    let batch = Batch {
        // Not a length yet: the first load writes the positions.
        seq: 0,
        slices: Slices { rows: 0, count: 1, accumulation: 1, micro: 0 },
        slice: options.strategy.slice(comm.rank()),
        ids: b.input(Dtype::I32, t),
        positions: b.input(Dtype::I32, t),
        targets: b.input(Dtype::I32, t),
        documents: options.documents.then(|| b.input(Dtype::I32, t)),
    };
    let scalars = b.input(Dtype::F64, SCALARS);
    let choices = b.input(Dtype::F64, options.logits_rows * comm.world());
    model.build(&mut b)?;
    let built = b.finish();
    let tensors = built.params.iter().filter(|p| p.replicated).count();
    let checked = if options.verify_replicated { comm.world() * tensors } else { 0 };
    let hashes = arena.take(Purpose::Activations, Dtype::F64, checked);
    let driver = Driver::take(arena, comm, &build_options, &built);
    Ok(Parts { built, driver, batch, scalars, choices, hashes })
}

impl<'a, M: Model> Trainer<'a, M> {
    /// Builds the model on `dev` and gives it its initial weights. Every rank of `comm` must call
    /// this with the same model and options.
    ///
    /// # Errors
    /// If the model's shapes do not fit together, the batch is too small for the ranks, there is
    /// not enough memory, or a rank fails.
    pub fn new(
        dev: &'a dyn Device,
        comm: Comm,
        mut model: M,
        options: TrainOptions,
    ) -> Result<Trainer<'a, M>> {
        options.check(comm.world())?;
        let mut arena = Arena::counting();
        let counted = build(&mut model, &mut arena, &comm, &options, None)?;
        let plan = arena.plan();
        let mut arena = Arena::live(dev, &plan)?;
        let counted = Some(counted.built.counted);
        let parts = build(&mut model, &mut arena, &comm, &options, counted)?;
        assert_eq!(arena.plan(), plan, "the live pass must ask for what was counted");
        let memory = arena.memory().expect("a live arena has memory");
        comm.share(dev, memory)?;
        comm.name_units(parts.built.unit_names);
        let mut host = HostBatch::new(&options, parts.batch.ids.len());
        if options.verify_replicated {
            let replicated = parts.built.params.iter().filter(|p| p.replicated);
            let longest = replicated.flat_map(|p| &p.pieces).map(|piece| piece.weights.len()).max();
            host.weights = vec![0.0; longest.unwrap_or(0)];
            host.hashes = vec![0.0; parts.hashes.len()];
        }
        let trainer = Trainer {
            dev,
            driver: parts.driver,
            model,
            plan,
            params: parts.built.params,
            replicated_gradients: parts.built.replicated_gradients,
            hashes: parts.hashes,
            scalars: parts.scalars,
            choices: parts.choices,
            batch: parts.batch,
            host,
            options,
            step: 0,
        };
        for param in &trainer.params {
            param.initialise(dev, trainer.options.seed);
        }
        trainer.refresh()?;
        Ok(trainer)
    }

    /// Bytes of this rank's arena, by purpose.
    #[must_use]
    pub const fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// Every parameter, with this rank's pieces. Between the calls of this trainer no other rank
    /// reads them, so they may be written, by all ranks alike; then [`refresh`](Trainer::refresh).
    #[must_use]
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// To be called by all ranks after weights have been written: those that this rank does not
    /// train but holds follow those that do.
    ///
    /// # Errors
    /// If a rank fails or is silent.
    pub fn refresh(&self) -> Result<()> {
        self.driver.refresh(self.dev)
    }

    /// The model.
    #[must_use]
    pub const fn model(&self) -> &M {
        &self.model
    }

    /// The communicator.
    #[must_use]
    pub const fn comm(&self) -> &Comm {
        self.driver.comm()
    }

    /// The device.
    #[must_use]
    pub const fn device(&self) -> &'a dyn Device {
        self.dev
    }

    /// The options.
    #[must_use]
    pub const fn options(&self) -> &TrainOptions {
        &self.options
    }

    /// Every row starts at position 0; only a change of length makes that news to the device.
    fn set_seq(&mut self, seq: usize) {
        if self.batch.seq == seq {
            return;
        }
        self.batch.seq = seq;
        let positions = self.batch.positions.first(self.batch.positions.len() / seq * seq);
        for (i, p) in self.host.inputs[..positions.len()].iter_mut().enumerate() {
            *p = i32::try_from(i % seq).expect("a context fits i32");
        }
        self.dev.write_i32(&self.host.inputs[..positions.len()], positions);
    }

    /// One optimiser step over the rows `first_row ..` of `source`. `stop` asks all ranks to stop
    /// after it.
    ///
    /// # Errors
    /// If loss or gradient are not finite: no weight has changed, and the next step may be tried.
    /// If a token is out of range, a rank fails or is silent, or replicated parameters differ: what
    /// this rank holds is then of no use.
    pub fn step(&mut self, source: &dyn Source, first_row: u64, stop: bool) -> Result<StepReport> {
        let report = self.accumulate(source, first_row, stop)?;
        let clip = self.options.clip_norm.map_or(1.0, |max| {
            // As torch.nn.utils.clip_grad_norm_.
            (f64::from(max) / (report.grad_norm + 1e-6)).min(1.0)
        });
        self.update(report.lr, clip as f32);
        self.refresh()?;
        if self.options.verify_replicated {
            self.verify_replicated()?;
        }
        Ok(report)
    }

    /// The gradient of one global batch, and its norm, without the update.
    ///
    /// # Errors
    /// As [`step`](Trainer::step).
    pub fn accumulate(
        &mut self,
        source: &dyn Source,
        first_row: u64,
        stop: bool,
    ) -> Result<StepReport> {
        let (count, accumulation) = (self.num_slices(), self.options.accumulation);
        let rows = self.options.batch;
        let targets = count_targets(source, first_row, rows as u64)?;
        self.dev.fill(self.scalars, 0.0);
        self.clear_gradients();
        for micro in 0..accumulation {
            let slices = Slices { rows, count, accumulation, micro };
            self.driver.begin(micro + 1 == accumulation);
            self.load(source, first_row, slices, self.options.seq)?;
            let cx = self.context(Phase::Train { step: self.step }, targets);
            self.model.forward(&cx)?;
            self.model.backward(&cx)?;
        }
        self.driver.settle(self.dev)?;
        if self.num_slices() > 1 {
            // Ranks that see the same tokens have the sum already.
            self.comm().all_reduce(self.dev, self.replicated_gradients)?;
        }
        self.sum_squares();
        self.count_loss_once();
        self.dev.write_f64(&[f64::from(u8::from(stop))], self.scalars.slice(STOP..STOP + 1));
        self.comm().all_reduce(self.dev, self.scalars)?;
        let mut sums = [0.0; SCALARS];
        self.dev.read_f64(self.scalars, &mut sums);
        // All ranks have these; their mean, so that no rank goes on where one has none.
        sums[REPLICATED_SQUARES] /= self.comm().world() as f64;
        let report = StepReport {
            step: self.step,
            loss: sums[LOSS] / targets as f64,
            grad_norm: (sums[SQUARES] + sums[REPLICATED_SQUARES]).sqrt(),
            lr: self.options.schedule.lr(self.step),
            targets,
            stop: sums[STOP] > 0.0,
        };
        for (what, value) in [("loss", report.loss), ("gradient norm", report.grad_norm)] {
            if !value.is_finite() {
                return Err(Error::NotFinite { step: self.step, what, value });
            }
        }
        Ok(report)
    }

    /// Mean loss per target token over rows `0 .. rows` of `source`, without dropout.
    ///
    /// # Errors
    /// If there is no target token, a token is out of range, or a rank fails or is silent.
    pub fn evaluate(&mut self, source: &dyn Source, rows: u64) -> Result<f64> {
        let count = self.num_slices();
        let rows_max = (self.batch.ids.len() / self.options.seq * count) as u64;
        self.dev.fill(self.scalars, 0.0);
        let targets = count_targets(source, 0, rows)?;
        let mut first_row = 0;
        while first_row < rows {
            // The last rows may leave ranks without any; they turn the ring all the same.
            let rows = (rows - first_row).min(rows_max) as usize;
            let slices = Slices { rows, count, accumulation: 1, micro: 0 };
            self.load(source, first_row, slices, self.options.seq)?;
            let cx = self.context(Phase::Evaluate, 1);
            self.model.forward(&cx)?;
            first_row += rows as u64;
        }
        self.count_loss_once();
        let loss = self.scalars.slice(LOSS..LOSS + 1);
        self.comm().all_reduce(self.dev, loss)?;
        let mut sum = [0.0];
        self.dev.read_f64(loss, &mut sum);
        Ok(sum[0] / targets as f64)
    }

    /// The logits that follow the last token of each of `prompts`, of which this rank makes those
    /// of its own slice, which [`prompts_of_rank`](Trainer::prompts_of_rank) tells: `out` becomes
    /// `[its rows, classes]`. Prompts may differ in length.
    ///
    /// # Errors
    /// If a prompt is empty, longer than `seq` or has an unknown token, there are more prompts than
    /// the model was built for, or a rank fails or is silent.
    pub fn logits(&mut self, prompts: &[&[i32]], out: &mut Vec<f32>) -> Result<()> {
        let (rows, count) = (prompts.len(), self.num_slices());
        let seq = prompts.iter().map(|p| p.len()).max().unwrap_or(0);
        let (longest, most) = (self.options.seq, self.prompts_max());
        if rows > most || seq > longest || prompts.iter().any(|p| p.is_empty()) {
            let what = format!(
                "{rows} prompts of up to {seq} tokens: the model was built for {most} of 1 to \
                 {longest}"
            );
            return Err(Error::Shape { what });
        }
        let slices = Slices { rows, count, accumulation: 1, micro: 0 };
        self.load(&Prompts(prompts), 0, slices, seq.max(1))?;
        let mine = &prompts[slices.rows(self.batch.slice)];
        let last: Vec<usize> = mine.iter().map(|p| p.len() - 1).collect();
        let cx = self.context(Phase::Evaluate, 1);
        let logits = self.model.logits(&cx, &last)?;
        out.resize(logits.len(), 0.0);
        self.dev.read_f32(logits, out);
        // From here nobody reads this rank's weights any more, as after every other call.
        self.comm().barrier()?;
        Ok(())
    }

    /// Whether every rank sees the whole batch.
    #[must_use]
    pub fn shares_batch(&self) -> bool {
        self.options.strategy == Strategy::Tp
    }

    /// Most prompts that the model was built for.
    #[must_use]
    pub fn prompts_max(&self) -> usize {
        self.options.logits_rows * self.num_slices()
    }

    /// Which of `num` prompts are in the slice of this rank. Under tensor parallelism all are in
    /// every rank's.
    #[must_use]
    pub fn prompts_of_rank(&self, num: usize) -> std::ops::Range<usize> {
        schedule::part(num, self.num_slices(), self.batch.slice)
    }

    /// Replaces each number by its sum over all ranks; at most one per prompt that the model was
    /// built for.
    ///
    /// # Errors
    /// If a rank fails or is silent.
    pub fn sum_over_ranks(&self, numbers: &mut [f64]) -> Result<()> {
        let region = self.choices.first(numbers.len());
        self.dev.write_f64(numbers, region);
        self.comm().all_reduce(self.dev, region)?;
        self.dev.read_f64(region, numbers);
        Ok(())
    }

    /// Number of classes of the model.
    #[must_use]
    pub fn classes(&self) -> usize {
        self.model.classes()
    }

    fn context(&self, phase: Phase, targets: u64) -> Context<'_> {
        Context {
            dev: self.dev,
            driver: &self.driver,
            batch: &self.batch,
            phase,
            seed: self.options.seed,
            loss_scale: (1.0 / targets as f64) as f32,
            loss: self.scalars.slice(LOSS..LOSS + 1),
        }
    }

    /// Moves this rank's rows of a micro-batch to the device.
    fn load(
        &mut self,
        source: &dyn Source,
        first_row: u64,
        slices: Slices,
        seq: usize,
    ) -> Result<()> {
        self.set_seq(seq);
        self.batch.slices = slices;
        let rows = slices.rows(self.batch.slice);
        let host = &mut self.host;
        for (i, row) in rows.clone().enumerate() {
            let part = i * seq..(i + 1) * seq;
            let documents = self.options.documents.then(|| &mut host.documents[part.clone()]);
            let (inputs, targets) = (&mut host.inputs[part.clone()], &mut host.targets[part]);
            source.fill(first_row + row as u64, inputs, targets, documents);
        }
        let len = rows.len() * seq;
        let classes = i32::try_from(self.model.classes()).unwrap_or(i32::MAX);
        let known = |id: &i32| (0..classes).contains(id);
        let strange = host.inputs[..len].iter().find(|id| !known(id));
        let strange = strange.or(host.targets[..len].iter().find(|t| **t >= 0 && !known(t)));
        if let Some(token) = strange {
            let what =
                format!("token {token} of the batch is not below the model's {classes} classes");
            return Err(Error::Shape { what });
        }
        self.dev.write_i32(&host.inputs[..len], self.batch.ids.first(len));
        self.dev.write_i32(&host.targets[..len], self.batch.targets.first(len));
        if let Some(documents) = self.batch.documents {
            self.dev.write_i32(&host.documents[..len], documents.first(len));
        }
        Ok(())
    }

    /// Number of slices that the batch is cut in.
    fn num_slices(&self) -> usize {
        self.options.strategy.num_slices(self.comm().world())
    }

    /// Where every rank sees the whole batch, one of them counts its loss.
    fn count_loss_once(&self) {
        if self.num_slices() == 1 && self.comm().rank() > 0 {
            self.dev.fill(self.scalars.slice(LOSS..LOSS + 1), 0.0);
        }
    }

    /// Sums of squares: of this rank's shards, and of the gradients that all ranks have.
    fn sum_squares(&self) {
        for param in &self.params {
            let slot = if param.replicated { REPLICATED_SQUARES } else { SQUARES };
            for piece in &param.pieces {
                self.dev.squared_norm(piece.gradients, self.scalars.slice(slot..slot + 1));
            }
        }
    }

    /// Clears the gradients of this rank's shards and of the replicated parameters.
    fn clear_gradients(&self) {
        if let Driver::Replicated(replicas) = &self.driver {
            // Of whole gradients a piece may be a part only.
            replicas.clear(self.dev);
            self.dev.fill(self.replicated_gradients, 0.0);
            return;
        }
        for piece in self.params.iter().flat_map(|p| &p.pieces) {
            self.dev.fill(piece.gradients, 0.0);
        }
    }

    /// Updates this rank's shards and the replicated parameters.
    fn update(&mut self, lr: f64, grad_scale: f32) {
        self.step += 1;
        let (rule, step) = (self.options.optimizer, self.step);
        for param in &self.params {
            for piece in &param.pieces {
                rule.update(self.dev, piece, lr, param.decay, grad_scale, step);
            }
        }
    }

    /// Compares a hash of every replicated tensor with the other ranks'.
    fn verify_replicated(&mut self) -> Result<()> {
        let comm = self.driver.comm();
        let replicated = || self.params.iter().filter(|p| p.replicated);
        let tensors = replicated().count();
        for (i, param) in replicated().enumerate() {
            let mut hash = 0x811c_9dc5;
            for piece in &param.pieces {
                let weights = &mut self.host.weights[..piece.weights.len()];
                self.dev.read_f32(piece.weights, weights);
                let fnv = |h: u32, w: &f32| (h ^ w.to_bits()).wrapping_mul(0x0100_0193);
                hash = weights.iter().fold(hash, fnv);
            }
            self.host.hashes[i] = f64::from(hash);
        }
        let own = comm.rank() * tensors..(comm.rank() + 1) * tensors;
        let mine = self.hashes.slice(own.clone());
        self.dev.write_f64(&self.host.hashes[..tensors], mine);
        comm.all_gather(self.dev, mine, self.hashes)?;
        self.dev.read_f64(self.hashes, &mut self.host.hashes);
        let hashes = &self.host.hashes;
        for rank in 0..comm.world() {
            for (i, param) in replicated().enumerate() {
                if hashes[rank * tensors + i] != hashes[i] {
                    let tensor = param.name.clone();
                    return Err(Error::Diverged { step: self.step - 1, tensor, rank });
                }
            }
        }
        Ok(())
    }
}

/// Target tokens of `rows` rows. Every rank counts the rows of all, which costs less than asking.
fn count_targets(source: &dyn Source, first_row: u64, rows: u64) -> Result<u64> {
    let targets = (first_row..first_row + rows).map(|row| source.num_targets(row) as u64).sum();
    if targets == 0 {
        let what = format!("{rows} rows have no target token; look at the data or take more rows");
        return Err(Error::Shape { what });
    }
    Ok(targets)
}

/// Prompts as rows without targets; short ones end in padding that causal attention never shows to
/// their last token.
struct Prompts<'p>(&'p [&'p [i32]]);

impl Source for Prompts<'_> {
    fn num_targets(&self, _row: u64) -> usize {
        0
    }

    fn fill(
        &self,
        row: u64,
        inputs: &mut [i32],
        targets: &mut [i32],
        documents: Option<&mut [i32]>,
    ) {
        let prompt = self.0[row as usize];
        inputs.fill(0);
        inputs[..prompt.len()].copy_from_slice(prompt);
        targets.fill(-1);
        if let Some(documents) = documents {
            documents.fill(0);
        }
    }
}

impl HostBatch {
    fn new(options: &TrainOptions, tokens: usize) -> HostBatch {
        HostBatch {
            inputs: vec![0; tokens],
            targets: vec![0; tokens],
            documents: vec![0; if options.documents { tokens } else { 0 }],
            ..HostBatch::default()
        }
    }
}
