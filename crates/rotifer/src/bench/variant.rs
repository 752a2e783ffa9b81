//! The strategies that a benchmark compares, as changes of a config.

use std::fmt;

use serde::Serialize;

use super::Error;
use crate::config::{Config, Hop, Ranks, Strategy, nearest};

/// A strategy, and how shards move where that is a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Variant {
    /// Rotated tensor parallelism, with hops as the config says.
    Rtp,
    /// The same with shards that are copied through spare buffers while the ranks compute, as over
    /// a network.
    RtpCopy,
    /// The same with shards that are copied in place, in small chunks, while the ranks wait: least
    /// memory.
    RtpInplace,
    /// All weights on each rank, gradients all-reduced.
    Ddp,
    /// As ddp, with the optimiser's state cut among the ranks.
    Zero1,
    /// Shards, gathered for each unit in forward and again in backward.
    Fsdp,
    /// As fsdp, but what forward has gathered is kept for backward.
    FsdpKeep,
    /// Shards that stay where they are; each rank sees the whole batch.
    Tp,
}

impl Variant {
    /// Every variant, in the order of reports.
    pub const ALL: [Variant; 8] = [
        Variant::Rtp,
        Variant::RtpCopy,
        Variant::RtpInplace,
        Variant::Ddp,
        Variant::Zero1,
        Variant::Fsdp,
        Variant::FsdpKeep,
        Variant::Tp,
    ];

    /// What "all" stands for: one of each kind, without those that matter on a simulated link or
    /// for a single trade-off only.
    pub const COMPARED: [Variant; 6] = [
        Variant::Rtp,
        Variant::RtpInplace,
        Variant::Ddp,
        Variant::Zero1,
        Variant::Fsdp,
        Variant::Tp,
    ];

    /// The name used in lists and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Variant::Rtp => "rtp",
            Variant::RtpCopy => "rtp-copy",
            Variant::RtpInplace => "rtp-inplace",
            Variant::Ddp => "ddp",
            Variant::Zero1 => "zero1",
            Variant::Fsdp => "fsdp",
            Variant::FsdpKeep => "fsdp-keep",
            Variant::Tp => "tp",
        }
    }

    /// The variants of a list such as `rtp,fsdp`; "all" stands for [`COMPARED`](Self::COMPARED).
    ///
    /// ```
    /// use rotifer::bench::Variant;
    /// assert_eq!(Variant::parse_list("fsdp, rtp")?, [Variant::Fsdp, Variant::Rtp]);
    /// assert_eq!(Variant::parse_list("all")?, Variant::COMPARED);
    /// # Ok::<(), rotifer::bench::Error>(())
    /// ```
    ///
    /// # Errors
    /// If a name is none of [`ALL`](Self::ALL).
    pub fn parse_list(list: &str) -> Result<Vec<Variant>, Error> {
        let mut variants = Vec::new();
        for name in list.split(',').map(str::trim) {
            if name == "all" {
                variants.extend(Variant::COMPARED);
            } else {
                variants.push(Variant::parse(name)?);
            }
        }
        Ok(variants)
    }

    fn parse(name: &str) -> Result<Variant, Error> {
        let known = Variant::ALL.map(Variant::name);
        Variant::ALL.into_iter().find(|v| v.name() == name).ok_or_else(|| Error::UnknownVariant {
            name: name.to_owned(),
            advice: match nearest(name, &known) {
                Some(near) => format!("did you mean {near}?"),
                None => format!("the strategies are {}, and all", known.join(", ")),
            },
        })
    }

    /// The config with this strategy on `ranks` ranks. On a simulated link shards are always
    /// copied; settings that another strategy reads are left out, and so is a text that the config
    /// would have written after training, with the memory that it takes.
    #[must_use]
    pub fn config(self, base: &Config, ranks: usize) -> Config {
        let mut config = base.clone();
        config.sample = None;
        let chosen = &mut config.ranks;
        chosen.count = ranks;
        chosen.reshard_after_forward = self != Variant::FsdpKeep;
        if matches!(self, Variant::RtpCopy | Variant::RtpInplace) || chosen.link_gbps.is_some() {
            chosen.hop = Hop::Copy;
        }
        match self {
            Variant::RtpCopy => chosen.overlap = true,
            Variant::RtpInplace => chosen.overlap = false,
            _ => (),
        }
        chosen.strategy = match self {
            Variant::Rtp | Variant::RtpCopy | Variant::RtpInplace => Strategy::Rtp,
            Variant::Ddp => Strategy::Ddp,
            Variant::Zero1 => Strategy::Zero1,
            Variant::Fsdp | Variant::FsdpKeep => Strategy::Fsdp,
            Variant::Tp => Strategy::Tp,
        };
        if chosen.strategy != Strategy::Rtp {
            chosen.travel_bytes_max = Ranks::default().travel_bytes_max;
        }
        config
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
