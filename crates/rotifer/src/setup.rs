//! From a config to what the library takes.

use std::time::Duration;

use rotifer_device as device;
use rotifer_ring::HopMode;
use rotifer_ring::launch::{self, Link};

use crate::config::{self, Config};
use crate::data::Splits;
use crate::layers::{EmbeddingRoute, Hidden, Logits};
use crate::models::Gpt2;
use crate::optim::Optimizer;
use crate::strategy::Strategy;
use crate::train::TrainOptions;

impl config::Strategy {
    /// What is run: a single rank turns a ring of its own.
    #[must_use]
    pub const fn built(self) -> Strategy {
        match self {
            config::Strategy::Rtp | config::Strategy::Single => Strategy::Rtp,
            config::Strategy::Ddp => Strategy::Ddp,
            config::Strategy::Zero1 => Strategy::Zero1,
            config::Strategy::Fsdp => Strategy::Fsdp,
            config::Strategy::Tp => Strategy::Tp,
        }
    }
}

impl Config {
    /// The model.
    #[must_use]
    pub fn gpt2(&self) -> Gpt2 {
        let model = &self.model;
        Gpt2 {
            vocab_size: self.vocab_size(),
            context: model.context,
            width: model.width,
            layers: model.layers,
            heads: model.heads,
            mlp_width: self.mlp_width(),
            activation: match model.activation {
                config::Activation::GeluTanh => device::Activation::GeluTanh,
                config::Activation::GeluErf => device::Activation::GeluErf,
            },
            tied: model.tied,
            dropout: model.dropout,
            mlp_hidden: match model.mlp_hidden {
                config::MlpHidden::Saved => Hidden::Saved,
                config::MlpHidden::Recomputed => Hidden::Recomputed,
            },
            logits: match model.logits {
                config::Logits::Recomputed => Logits::Recomputed,
                config::Logits::Kept => Logits::Kept,
            },
            embedding: match model.embedding {
                config::Embedding::Auto => EmbeddingRoute::Fewest,
                config::Embedding::Table => EmbeddingRoute::Table,
                config::Embedding::Rows => EmbeddingRoute::Rows,
            },
            init_std: model.init_std,
        }
    }

    /// The options of the training step.
    #[must_use]
    pub fn train_options(&self, splits: &Splits) -> TrainOptions {
        let rule = &self.optimizer;
        let (beta1, beta2, eps) = (rule.beta1, rule.beta2, rule.eps);
        let weight_decay = rule.weight_decay;
        // The end of a run samples text, if there is a tokenizer to read it with.
        let samples = self.sample.is_some() && splits.train.is_text();
        TrainOptions {
            strategy: self.ranks.strategy.built(),
            batch: self.train.batch,
            accumulation: self.train.accumulation,
            seq: self.seq(),
            seed: self.train.seed,
            clip_norm: self.train.clip_norm,
            optimizer: match rule.kind {
                config::OptimizerKind::AdamW => {
                    Optimizer::AdamW { beta1, beta2, eps, weight_decay }
                }
                config::OptimizerKind::Sgd => {
                    Optimizer::Sgd { momentum: rule.momentum, weight_decay }
                }
            },
            schedule: self.lr_schedule(),
            overlap: self.ranks.overlap,
            reshard_after_forward: self.ranks.reshard_after_forward,
            travel_bytes_max: self.ranks.travel_bytes_max,
            documents: self.data.document_mask,
            logits_rows: usize::from(samples),
            verify_replicated: cfg!(debug_assertions),
            train: true,
        }
    }

    /// The link that hops seem to go over.
    #[must_use]
    pub fn link(&self) -> Option<Link> {
        let latency = Duration::from_secs_f64(self.ranks.link_latency_us * 1e-6);
        self.ranks.link_gbps.map(|gbps| Link { latency, bytes_per_sec: gbps * 1e9 / 8.0 })
    }

    /// How the ranks are started.
    #[must_use]
    pub fn launch_options(&self) -> launch::Options {
        launch::Options {
            ranks: self.ranks.count,
            hop_mode: self.hop_mode(),
            deadline: Duration::from_secs(self.ranks.deadline_secs),
            link: self.link(),
            simulation: None,
        }
    }

    /// How shards travel.
    #[must_use]
    pub const fn hop_mode(&self) -> HopMode {
        match self.ranks.hop {
            config::Hop::HandOver => HopMode::HandOver,
            config::Hop::Copy => HopMode::Copy,
        }
    }
}
