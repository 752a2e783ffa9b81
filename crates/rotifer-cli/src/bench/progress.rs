//! Progress of a benchmark: a bar on a terminal, a plain line per measurement elsewhere.

use std::cell::Cell;
use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use rotifer::bench::{CapacityRow, Measurement, Observer};
use rotifer::{Error, Result};

use crate::table::count;

pub struct Progress {
    /// `None` where standard error is no terminal.
    bar: Option<ProgressBar>,
    searched: Cell<u64>,
}

impl Progress {
    pub fn new() -> Progress {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg} eta {eta}");
            ProgressBar::new(0).with_style(style.expect("a valid template"))
        });
        Progress { bar, searched: Cell::new(0) }
    }

    pub fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    /// One of `of` searches is done; their results are soon printed together.
    pub fn searched(&self, row: &CapacityRow, of: usize) {
        self.searched.set(self.searched.get() + 1);
        if let Some(bar) = &self.bar {
            bar.set_length(of as u64);
            bar.set_position(self.searched.get());
            bar.set_message(format!("{} on {} rank(s)", row.strategy, row.ranks));
        }
    }
}

impl Observer for Progress {
    fn begins(&self, m: &Measurement) {
        if let Some(bar) = &self.bar {
            bar.set_length(m.of as u64);
            bar.set_position(m.number as u64);
            bar.set_message(format!("{} on {} rank(s)", m.variant, m.ranks));
            bar.enable_steady_tick(Duration::from_secs(1));
        }
    }

    fn ends(&self, m: &Measurement, outcome: Result<f64, &Error>) {
        let outcome = match outcome {
            Ok(tokens_per_sec) => format!("{} tokens/s", count(tokens_per_sec as u64)),
            // The reason stands in the closing table.
            Err(_) => "not possible".into(),
        };
        if self.bar.is_none() {
            let (round, what) = (m.round + 1, m.variant);
            println!("round {round}  {what} on {} rank(s): {outcome}", m.ranks);
        }
    }
}
