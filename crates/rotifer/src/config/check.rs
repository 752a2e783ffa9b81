//! Checks of a config that is complete: ranges of single values, then what must fit together.

use super::{Config, Embedding, Error, Hop, Ranks, ScheduleKind, Strategy};
use crate::layers::HEAD_DIM_MAX;
use crate::strategy;

/// A bound of a single value; NaN is within none.
fn check(key: &'static str, value: f64, inside: bool, allowed: &'static str) -> Result<(), Error> {
    if inside { Ok(()) } else { Err(Error::Range { key, value, allowed }) }
}

impl Config {
    /// Checks every value and how they fit together. [`load`](Config::load) has done so; a config
    /// that is changed in code needs it.
    ///
    /// # Errors
    /// The first value that is out of its range, or the first contradiction.
    pub fn validate(&self) -> Result<(), Error> {
        self.check_counts()?;
        self.check_fractions()?;
        self.check_shapes()?;
        self.check_run()
    }

    fn check_counts(&self) -> Result<(), Error> {
        let Config { model, data, train, ranks, sample, .. } = self;
        let counts = [
            ("model.vocab_size", self.vocab_size() as u64),
            ("model.context", model.context as u64),
            ("model.width", model.width as u64),
            ("model.layers", model.layers as u64),
            ("model.heads", model.heads as u64),
            ("model.mlp_width", self.mlp_width() as u64),
            ("data.seq", self.seq() as u64),
            ("train.steps", train.steps),
            ("train.batch", train.batch as u64),
            ("train.accumulation", train.accumulation as u64),
            ("train.log_every", train.log_every),
            ("ranks.count", ranks.count as u64),
            ("ranks.travel_bytes_max", ranks.travel_bytes_max as u64),
            ("ranks.deadline_secs", ranks.deadline_secs),
            ("checkpoint.file_bytes_max", self.checkpoint.file_bytes_max as u64),
            ("schedule.decay_steps", self.decay_steps()),
            ("data.train (number of entries)", data.train.len() as u64),
            ("sample.tokens", sample.as_ref().map_or(1, |s| s.tokens as u64)),
        ];
        for (key, value) in counts {
            check(key, value as f64, value > 0, "at least 1")?;
        }
        // Token ids and targets are i32.
        let (vocab, max) = (self.vocab_size(), i32::MAX as usize);
        check("model.vocab_size", vocab as f64, vocab <= max, "below 2^31")
    }

    fn check_fractions(&self) -> Result<(), Error> {
        let Config { model, data, train, optimizer, schedule, sample, .. } = self;
        let positive = |key, x: f64| check(key, x, x > 0.0 && x.is_finite(), "above 0");
        let at_least_0 = |key, x: f64| check(key, x, x >= 0.0 && x.is_finite(), "0 or more");
        let below_1 = |key, x: f64| check(key, x, (0.0..1.0).contains(&x), "in [0, 1)");
        below_1("model.dropout", model.dropout.into())?;
        positive("model.init_std", model.init_std.into())?;
        below_1("data.validation_fraction", data.validation_fraction)?;
        if let Some(norm) = train.clip_norm {
            positive("train.clip_norm", norm.into())?;
        }
        positive("optimizer.lr", optimizer.lr)?;
        below_1("optimizer.beta1", optimizer.beta1.into())?;
        below_1("optimizer.beta2", optimizer.beta2.into())?;
        positive("optimizer.eps", optimizer.eps.into())?;
        at_least_0("optimizer.weight_decay", optimizer.weight_decay.into())?;
        below_1("optimizer.momentum", optimizer.momentum.into())?;
        if let Some(gbps) = self.ranks.link_gbps {
            positive("ranks.link_gbps", gbps)?;
        }
        at_least_0("ranks.link_latency_us", self.ranks.link_latency_us)?;
        let ratio = schedule.final_lr_ratio;
        check("schedule.final_lr_ratio", ratio, (0.0..=1.0).contains(&ratio), "in [0, 1]")?;
        if let Some(sample) = sample {
            at_least_0("sample.temperature", sample.temperature.into())?;
            let top_p = f64::from(sample.top_p.unwrap_or(1.0));
            check("sample.top_p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0, and 1 at most")?;
        }
        Ok(())
    }

    fn check_shapes(&self) -> Result<(), Error> {
        let (heads, width) = (self.model.heads, self.model.width);
        if !width.is_multiple_of(heads) {
            return Err(Error::HeadsDoNotDivideWidth { heads, width });
        }
        if width / heads > HEAD_DIM_MAX {
            return Err(Error::HeadTooWide { heads, width, most: HEAD_DIM_MAX });
        }
        let (seq, context) = (self.seq(), self.model.context);
        if seq > context {
            return Err(Error::SeqExceedsContext { seq, context });
        }
        self.check_size()
    }

    /// Checks that sizes can be counted: products of them must stay far from what integers hold.
    fn check_size(&self) -> Result<(), Error> {
        let model = &self.model;
        let sizes = [
            self.vocab_size(),
            model.context,
            model.width,
            self.mlp_width(),
            model.layers,
            self.train.batch,
        ];
        let [v, p, c, f, l, b] = sizes.map(|n| n as f64);
        let weights = (v + p) * c + l * (4.0 * c * c + 2.0 * c * f);
        let activations = b * p * (l * (10.0 * c + f) + v);
        // 4 bytes each, in four copies; 2^50 bytes are more than any cluster has.
        if (weights + activations) * 16.0 > 2f64.powi(50) {
            return Err(Error::TooLarge { weights, activations });
        }
        Ok(())
    }

    /// Checks what only some strategies can do, and refuses settings that the chosen one would not
    /// read.
    fn check_strategy(&self) -> Result<(), Error> {
        let (heads, ranks, strategy) = (self.model.heads, self.ranks.count, self.ranks.strategy);
        if strategy == Strategy::Tp && !heads.is_multiple_of(ranks) {
            return Err(Error::HeadsDoNotDivideRanks { heads, ranks });
        }
        let strategy = strategy.built();
        let rotates = strategy == strategy::Strategy::Rtp;
        if self.model.embedding == Embedding::Rows && !rotates {
            return Err(Error::RowsOnlyRotate { strategy });
        }
        let (ranks, usual) = (&self.ranks, Ranks::default());
        if ranks.travel_bytes_max != usual.travel_bytes_max && !rotates {
            let (key, reader) = ("ranks.travel_bytes_max", strategy::Strategy::Rtp);
            return Err(Error::NotRead { key, strategy, reader });
        }
        let reader = strategy::Strategy::Fsdp;
        if ranks.reshard_after_forward != usual.reshard_after_forward && strategy != reader {
            return Err(Error::NotRead { key: "ranks.reshard_after_forward", strategy, reader });
        }
        Ok(())
    }

    fn check_run(&self) -> Result<(), Error> {
        let (ranks, batch) = (self.ranks.count, self.train.batch);
        if self.ranks.strategy == Strategy::Single && ranks != 1 {
            return Err(Error::SingleWithRanks { ranks });
        }
        self.check_strategy()?;
        // Under tensor parallelism every rank sees all rows.
        let slices = self.ranks.strategy.built().num_slices(ranks);
        if slices > batch {
            return Err(Error::RanksExceedBatch { ranks, batch });
        }
        let ranks_config = &self.ranks;
        let simulated = ranks_config.link_gbps.is_some() || ranks_config.link_latency_us > 0.0;
        if simulated && (ranks_config.hop != Hop::Copy || ranks_config.link_gbps.is_none()) {
            return Err(Error::LinkWithoutCopies);
        }
        let accumulation = self.train.accumulation;
        let rows = batch.div_ceil(slices);
        if accumulation > rows {
            return Err(Error::AccumulationExceedsRows { batch, ranks, rows, accumulation });
        }
        let (warmup_steps, steps) = (self.schedule.warmup_steps, self.train.steps);
        let is_wsd = self.schedule.kind == ScheduleKind::Wsd;
        let decay_steps = if is_wsd { self.decay_steps() } else { 0 };
        if warmup_steps.saturating_add(decay_steps) > steps {
            return Err(Error::ScheduleExceedsSteps { warmup_steps, decay_steps, steps });
        }
        let (eval_every, fraction) = (self.train.eval_every, self.data.validation_fraction);
        match (self.data.validation.is_empty(), fraction > 0.0) {
            (false, true) => Err(Error::TwoValidations { fraction }),
            (true, false) if eval_every > 0 => Err(Error::NothingToEvaluate { eval_every }),
            _ => Ok(()),
        }
    }
}
