//! Progress: a bar on a terminal, plain lines elsewhere.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use rotifer::session::{Observer, RunInfo, StepLine};

use crate::table::{bytes, count};

/// Not on a terminal, no more than one step line in this time, so that a log stays readable.
const LINE_EVERY: Duration = Duration::from_secs(2);

pub struct Progress {
    /// `None` where standard error is no terminal.
    bar: Option<ProgressBar>,
    last_line: Mutex<Option<Instant>>,
}

impl Progress {
    pub fn new() -> Progress {
        let bar = std::io::stderr().is_terminal().then(|| ProgressBar::new(0));
        Progress { bar, last_line: Mutex::new(None) }
    }

    pub fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn print(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| println!("{line}")),
            None => println!("{line}"),
        }
    }

    /// Whether a plain line is due: the first, the last, and one now and then.
    fn due(&self, step: &StepLine) -> bool {
        let mut last = self.last_line.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let due = last.is_none_or(|at| at.elapsed() >= LINE_EVERY) || step.step == step.steps;
        if due {
            *last = Some(Instant::now());
        }
        due
    }
}

impl Observer for Progress {
    fn started(&self, info: &RunInfo) {
        self.print(&format!(
            "{} parameters on {} rank(s) x {} thread(s), {}; {} per rank",
            count(info.parameters),
            info.ranks,
            info.threads,
            info.form,
            bytes(info.plan.total() as u64),
        ));
        self.print(&format!(
            "{} tokens to train on, {} held out; a step is {} tokens",
            count(info.train_tokens),
            count(info.validation_tokens),
            count(info.step_tokens)
        ));
        if let Some(bar) = &self.bar {
            let style = "{bar:24} step {pos}/{len} {msg} eta {eta}";
            bar.set_style(ProgressStyle::with_template(style).expect("a valid template"));
            bar.set_length(info.steps);
        }
    }

    fn step(&self, line: &StepLine) {
        let text = format!(
            "loss {:.4}  {} tokens/s  {} per rank",
            line.loss,
            count(line.tokens_per_sec as u64),
            bytes(line.peak_bytes)
        );
        if let Some(bar) = &self.bar {
            bar.set_position(line.step);
            bar.set_message(text);
        } else if self.due(line) {
            println!("step {}/{}  {text}", line.step, line.steps);
        }
    }

    fn evaluated(&self, step: u64, loss: f64) {
        self.print(&format!("step {step}: held-out loss {loss:.4} (perplexity {:.2})", loss.exp()));
    }

    fn sample(&self, text: &str) {
        self.print(&format!("sample:\n{text}"));
    }
}
