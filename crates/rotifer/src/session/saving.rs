//! When a run saves, and how it goes on from what was saved.

use std::path::PathBuf;

use super::metrics::is_evaluated;
use super::{Run, claim_folder};
use crate::checkpoint::{self, Checkpoint, DataFacts, Disk, Progress, Saving};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::models::Model;
use crate::train::Trainer;

/// Where a run begins.
pub(super) struct Start {
    /// What it goes on from; `None` if it begins anew.
    pub from: Option<Checkpoint>,
    /// Where it writes.
    pub folder: PathBuf,
    /// Whether that is where the run it goes on from has written.
    pub same_folder: bool,
    /// Whether the run was asked to stop after a step whose evaluation was due.
    pub owes_evaluation: bool,
}

impl Start {
    /// Decides where a run of `config` begins and writes. It goes on in the folder of the
    /// checkpoint's run, unless the config names another, which then gets a branch of it.
    pub fn new(config: &Config, from: Option<Checkpoint>, data: &DataFacts) -> Result<Start> {
        let Some(from) = from else {
            let folder = claim_folder(config)?;
            return Ok(Start { from: None, folder, same_folder: false, owes_evaluation: false });
        };
        from.require_same_run(config, data)?;
        let (step, steps) = (from.state().step, config.train.steps);
        if step >= steps {
            return Err(Error::Finished { folder: from.folder().into(), step, steps });
        }
        let own = from.run().filter(|own| {
            config.train.out.as_ref().is_none_or(|out| {
                let real = |path| std::fs::canonicalize(path).ok();
                real(out.as_path()) == real(own)
            })
        });
        let (folder, same_folder) = match own {
            Some(own) => (own.to_owned(), true),
            None => (claim_folder(config)?, false),
        };
        let every = config.train.eval_every;
        let due = same_folder && every > 0 && step.is_multiple_of(every);
        let owes_evaluation = due && !is_evaluated(&folder, step);
        Ok(Start { from: Some(from), folder, same_folder, owes_evaluation })
    }

    /// Steps that are done before the run begins.
    pub fn steps(&self) -> u64 {
        self.from.as_ref().map_or(0, |from| from.state().step)
    }

    /// Steps whose metrics are in the folder.
    pub fn logged(&self) -> u64 {
        if self.same_folder { self.steps() } else { 0 }
    }

    /// Takes up what was saved. Every rank calls this.
    pub fn restore<M: Model>(&self, trainer: &mut Trainer<'_, M>) -> Result<()> {
        let Some(from) = &self.from else { return Ok(()) };
        checkpoint::restore(trainer, from)?;
        // From here on what is newer than an older checkpoint is a future that was given up.
        if self.same_folder && trainer.comm().rank() == 0 {
            from.make_latest()?;
        }
        Ok(())
    }
}

impl Run<'_> {
    /// Whether a checkpoint is due after so many steps. The one at the end is a matter of its own.
    pub(super) fn save_due(&self, steps: u64) -> bool {
        let every = self.config.checkpoint.every;
        every > 0 && steps.is_multiple_of(every)
    }

    /// Saves a checkpoint after `steps` steps. Every rank calls this.
    pub(super) fn save_step<M: Model>(&self, trainer: &Trainer<'_, M>, steps: u64) -> Result<()> {
        let progress = Progress {
            step: steps,
            rows: steps * self.options.batch as u64,
            data: &self.data,
            config: self.config,
        };
        let saving = Saving {
            run: &self.start.folder,
            keep: self.config.checkpoint.keep,
            file_bytes_max: self.config.checkpoint.file_bytes_max,
            beside: &[(checkpoint::CONFIG.to_owned(), self.hf.text().into_bytes())],
            disk: &Disk::new(),
        };
        checkpoint::save_step(trainer, &progress, &saving)?;
        Ok(())
    }

    /// Saves what a run ends with, after `steps` steps of which `saved` are saved: a checkpoint,
    /// and the weights in the run's folder. Every rank calls this.
    pub(super) fn save_end<M: Model>(
        &self,
        trainer: &Trainer<'_, M>,
        steps: u64,
        saved: u64,
    ) -> Result<()> {
        if steps > saved {
            self.save_step(trainer, steps)?;
        }
        let file_bytes_max = self.config.checkpoint.file_bytes_max;
        checkpoint::save_in_files(trainer, &self.start.folder, file_bytes_max)
    }
}
