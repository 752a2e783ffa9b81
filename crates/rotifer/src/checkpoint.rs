//! Checkpoints: folders of safetensors files with Hugging Face names, and what a run needs to go
//! on.
//!
//! Files know no N: each rank writes and reads its own bytes of every tensor at their place in the
//! files, through one buffer of fixed size, so that any number of ranks loads what any other number
//! saved, and nothing is gathered. `docs/checkpoints.md` has the formats.

mod disk;
mod header;
mod plan;
mod rank_file;
mod read;
mod state;
mod steps;

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::models::Model;
use crate::train::Trainer;
pub use disk::Disk;
use disk::io_error;
use plan::{Plan, Stored};
use rank_file::Mover;
use read::Files;
pub use read::weights_bytes;
pub use state::{Checkpoint, DataFacts, Progress, STATE, SavedBy, State};
pub use steps::{CHECKPOINTS, LATEST};

/// Name of the weights' file in a folder, unless there are several.
pub const WEIGHTS: &str = "model.safetensors";

/// Name of the model's description in a folder.
pub const CONFIG: &str = "config.json";

/// What the names of the weights' files begin with.
const WEIGHTS_STEM: &str = "model";

/// What the names of the optimiser states' files begin with.
const STATES_STEM: &str = "optimizer";

/// Size that a file does not exceed unless a single tensor does, or a run says otherwise.
pub const DEFAULT_FILE_BYTES_MAX: usize = 5_000_000_000;

/// Bytes of tensors after which ranks sync and wait for each other, so that none waits long for
/// the others' writing at the end.
const ROUND_BYTES: u64 = 256 << 20;

/// [`save_in_files`] with files of the default size.
///
/// # Errors
/// As [`save_in_files`].
pub fn save<M: Model>(trainer: &Trainer<'_, M>, folder: &Path) -> Result<()> {
    save_in_files(trainer, folder, DEFAULT_FILE_BYTES_MAX)
}

/// Writes the weights into `folder`, which all ranks see: `model.safetensors`, or several files and
/// `model.safetensors.index.json` where one would exceed `file_bytes_max`. Every rank calls this.
/// Files get their names when all ranks have written their parts and they are on disk.
///
/// # Errors
/// If the folder cannot be written, or a rank fails.
pub fn save_in_files<M: Model>(
    trainer: &Trainer<'_, M>,
    folder: &Path,
    file_bytes_max: usize,
) -> Result<()> {
    let comm = trainer.comm();
    let disk = &Disk::new();
    let tensors = plan::weights(trainer.params());
    let plan = Plan::new(WEIGHTS_STEM, &tensors, file_bytes_max as u64);
    if comm.rank() == 0 {
        disk.create_folder(folder)?;
    }
    let mut mover = Mover::new(trainer.device());
    write(trainer, disk, folder, steps::PARTIAL, &plan, &tensors, &mut mover)?;
    if comm.rank() == 0 {
        for file in &plan.files {
            let partial = folder.join(format!("{}{}", file.name, steps::PARTIAL));
            disk.rename(&partial, &folder.join(&file.name))?;
        }
        let index = folder.join(format!("{WEIGHTS_STEM}{}", plan::INDEX_SUFFIX));
        if let Some((name, content)) = &plan.index {
            let partial = folder.join(format!("{name}{}", steps::PARTIAL));
            disk.write_file(&partial, content)?;
            disk.rename(&partial, &folder.join(name))?;
        }
        // Weights of an earlier save in the other form would be older than these.
        let other = if plan.index.is_some() { folder.join(WEIGHTS) } else { index };
        if other.exists() {
            disk.remove(&other)?;
        }
        disk.sync_folder(folder)?;
    }
    comm.barrier()?;
    Ok(())
}

/// Reads the weights of `folder` into the model: each rank its own bytes.
///
/// # Errors
/// If a file is damaged, or its tensors are not the model's: the file and the tensor are named.
pub fn load<M: Model>(trainer: &Trainer<'_, M>, folder: &Path) -> Result<()> {
    let mut mover = Mover::new(trainer.device());
    // No other rank reads this one's weights now: see `Trainer::params`.
    let tensors = plan::weights(trainer.params());
    Files::open(folder, WEIGHTS_STEM)?.fetch(&tensors, &mut mover)?;
    trainer.refresh()
}

/// How to save a checkpoint.
#[derive(Debug)]
pub struct Saving<'a> {
    /// The run's folder, which all ranks see.
    pub run: &'a Path,
    /// Checkpoints that are kept, this one included; 0 for all.
    pub keep: usize,
    /// Size that a file does not exceed unless a single tensor does.
    pub file_bytes_max: usize,
    /// Names and contents of other files to be in the checkpoint's folder, such as `config.json`.
    pub beside: &'a [(String, Vec<u8>)],
    /// Where it is written.
    pub disk: &'a Disk,
}

/// Saves a checkpoint: weights, optimiser state and `state.json`, in
/// `run/checkpoints/step-000100`. Every rank calls this. When it returns, the checkpoint is on disk
/// and the run's newest; if it ends at any moment before, that is the one before it. Returns the
/// checkpoint's folder.
///
/// # Errors
/// If the folder cannot be written, or a rank fails.
pub fn save_step<M: Model>(
    trainer: &Trainer<'_, M>,
    progress: &Progress<'_>,
    saving: &Saving<'_>,
) -> Result<PathBuf> {
    let Saving { run, disk, .. } = *saving;
    let comm = trainer.comm();
    let first = comm.rank() == 0;
    let (folder, partial) = steps::folders(run, progress.step);
    if first {
        steps::begin(disk, run, progress.step)?;
    }
    let kinds = trainer.options().optimizer.state_names();
    let params = trainer.params();
    let mut mover = Mover::new(trainer.device());
    let mut files = BTreeMap::new();
    for (stem, tensors) in
        [(WEIGHTS_STEM, plan::weights(params)), (STATES_STEM, plan::states(params, kinds))]
    {
        if tensors.is_empty() {
            continue;
        }
        let plan = Plan::new(stem, &tensors, saving.file_bytes_max as u64);
        write(trainer, disk, &partial, "", &plan, &tensors, &mut mover)?;
        files.extend(plan.files.iter().map(|file| (file.name.clone(), file.bytes)));
        if let Some((name, content)) = plan.index.filter(|_| first) {
            disk.write_file(&partial.join(&name), &content)?;
            files.insert(name, content.len() as u64);
        }
    }
    if first {
        for (name, content) in saving.beside {
            disk.write_file(&partial.join(name), content)?;
            files.insert(name.clone(), content.len() as u64);
        }
        let parameters = params.iter().map(|param| param.len() as u64).sum();
        let saved_by = SavedBy {
            rotifer: env!("CARGO_PKG_VERSION").to_owned(),
            ranks: comm.world(),
            strategy: trainer.options().strategy.name().to_owned(),
        };
        let state = progress.state(trainer.updates(), parameters, kinds, saved_by, files);
        let mut text = serde_json::to_vec_pretty(&state).expect("a state is always JSON");
        text.push(b'\n');
        disk.write_file(&partial.join(STATE), &text)?;
        steps::publish(disk, run, progress.step, saving.keep)?;
    }
    comm.barrier()?;
    Ok(folder)
}

/// Gives a trainer the weights, the optimiser state and the number of updates of a checkpoint: each
/// rank reads its own bytes. Every rank calls this.
///
/// # Errors
/// If a file is damaged, or its tensors are not the model's: the file and the tensor are named.
pub fn restore<M: Model>(trainer: &mut Trainer<'_, M>, checkpoint: &Checkpoint) -> Result<()> {
    let kinds = trainer.options().optimizer.state_names();
    let state = checkpoint.state();
    if state.optimizer != kinds {
        let what = format!(
            "has the optimiser state {:?}, but this run's optimiser keeps {kinds:?}",
            state.optimizer
        );
        return Err(Error::Checkpoint { path: checkpoint.folder().join(STATE), what });
    }
    load(trainer, checkpoint.folder())?;
    let tensors = plan::states(trainer.params(), kinds);
    if !tensors.is_empty() {
        let mut mover = Mover::new(trainer.device());
        Files::open(checkpoint.folder(), STATES_STEM)?.fetch(&tensors, &mut mover)?;
    }
    trainer.set_updates(state.updates);
    Ok(())
}

/// Writes the files of a plan, which are named with `suffix`: every rank its own bytes. When it
/// returns, they are on disk on every rank's side.
fn write<M: Model>(
    trainer: &Trainer<'_, M>,
    disk: &Disk,
    folder: &Path,
    suffix: &str,
    plan: &Plan,
    tensors: &[Stored<'_>],
    mover: &mut Mover<'_>,
) -> Result<()> {
    let comm = trainer.comm();
    let path = |file: usize| folder.join(format!("{}{suffix}", plan.files[file].name));
    if comm.rank() == 0 {
        for (number, file) in plan.files.iter().enumerate() {
            let created = disk.create(&path(number), file.bytes)?;
            disk.write(&created, &path(number), &file.header, 0)?;
        }
    }
    comm.barrier()?;
    let mut open: Option<(usize, PathBuf, File)> = None;
    let mut round = 0;
    for (tensor, (number, start)) in tensors.iter().zip(&plan.places) {
        if open.as_ref().is_none_or(|(open, ..)| open != number) {
            sync(disk, open.as_ref())?;
            let path = path(*number);
            let file =
                OpenOptions::new().write(true).open(&path).map_err(io_error("open", &path))?;
            open = Some((*number, path, file));
        }
        let Some((_, path, file)) = &open else { continue };
        // All ranks have replicated parameters; one writes them.
        if !tensor.param.replicated || comm.rank() == 0 {
            mover.store(disk, (file, path), tensor, *start)?;
        }
        round += tensor.bytes();
        if round >= ROUND_BYTES {
            round = 0;
            sync(disk, open.as_ref())?;
            comm.barrier()?;
        }
    }
    sync(disk, open.as_ref())?;
    comm.barrier()?;
    Ok(())
}

fn sync(disk: &Disk, open: Option<&(usize, PathBuf, File)>) -> Result<()> {
    open.map_or(Ok(()), |(_, path, file)| disk.sync(file, path))
}
