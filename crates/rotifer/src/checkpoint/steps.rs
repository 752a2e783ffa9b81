//! The checkpoints of a run: a folder each, and a file that names the newest.
//!
//! A checkpoint gets its name when every byte of it is on disk, `latest` names it after that, and
//! older ones go last. So whenever a save ends, `latest` names a whole checkpoint; before the first
//! one there is no `latest`, and whatever has the name of a checkpoint is one.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use super::Disk;
use super::disk::io_error;
use super::state::STATE;
use crate::error::{Error, Result};

/// The folder of a run's checkpoints.
pub const CHECKPOINTS: &str = "checkpoints";

/// The file that names the newest checkpoint.
pub const LATEST: &str = "latest";

/// What the name of something unfinished ends in.
pub(super) const PARTIAL: &str = ".partial";

/// What the name of a checkpoint ends in that is being removed.
const OLD: &str = ".old";

/// Bytes of `latest` that are read; a name has far fewer.
const NAME_BYTES_MAX: u64 = 256;

/// Name of the checkpoint after so many steps.
fn name_of(step: u64) -> String {
    format!("step-{step:06}")
}

fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (name_of(step) == name).then_some(step)
}

/// Names of what is in a folder.
fn names(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(io_error("read folder", folder))? {
        let name = entry.map_err(io_error("read folder", folder))?.file_name();
        // What is not Unicode is none of ours.
        names.extend(name.into_string());
    }
    Ok(names)
}

/// The steps of the checkpoints in `run/checkpoints`, in ascending order.
fn steps_in(checkpoints: &Path) -> Result<Vec<u64>> {
    let mut steps: Vec<u64> = names(checkpoints)?.iter().filter_map(|name| step_of(name)).collect();
    steps.sort_unstable();
    Ok(steps)
}

/// The folder that a run's checkpoint after `step` steps has in the end, and the one that it is
/// written in.
pub(super) fn folders(run: &Path, step: u64) -> (PathBuf, PathBuf) {
    let name = name_of(step);
    let checkpoints = run.join(CHECKPOINTS);
    (checkpoints.join(&name), checkpoints.join(name + PARTIAL))
}

/// Makes `run/checkpoints/step-N.partial`, new and empty. What an earlier save left unfinished is
/// removed.
pub(super) fn begin(disk: &Disk, run: &Path, step: u64) -> Result<()> {
    let checkpoints = run.join(CHECKPOINTS);
    if !checkpoints.is_dir() {
        disk.create_folder(&checkpoints)?;
        disk.sync_folder(run)?;
    }
    for name in names(&checkpoints)? {
        let unfinished = name.strip_suffix(PARTIAL).or(name.strip_suffix(OLD));
        if unfinished.is_some_and(|name| step_of(name).is_some()) {
            disk.remove_folder(&checkpoints.join(name))?;
        }
    }
    disk.create_folder(&folders(run, step).1)
}

/// Makes what is in `run/checkpoints/step-N.partial` the newest checkpoint of the run, then removes
/// all older ones but `keep - 1` (none if `keep` is 0). Its files must be on disk.
pub(super) fn publish(disk: &Disk, run: &Path, step: u64, keep: usize) -> Result<PathBuf> {
    let (folder, partial) = folders(run, step);
    let checkpoints = run.join(CHECKPOINTS);
    disk.sync_folder(&partial)?;
    if folder.exists() {
        // From a future that was given up when the run went on from an earlier checkpoint, which
        // `latest` names.
        withdraw(disk, &folder)?;
    }
    disk.rename(&partial, &folder)?;
    disk.sync_folder(&checkpoints)?;
    point_at(disk, run, step)?;
    let mut older = steps_in(&checkpoints)?;
    older.retain(|other| *other < step);
    let surplus = if keep == 0 { 0 } else { older.len().saturating_sub(keep - 1) };
    for old in &older[..surplus] {
        withdraw(disk, &checkpoints.join(name_of(*old)))?;
    }
    Ok(folder)
}

/// Removes a checkpoint, which first loses its name, so that nobody takes a half for the whole.
fn withdraw(disk: &Disk, folder: &Path) -> Result<()> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let doomed = folder.with_file_name(format!("{name}{OLD}"));
    disk.rename(folder, &doomed)?;
    disk.remove_folder(&doomed)
}

/// Lets `run/checkpoints/latest` name the checkpoint after `step` steps.
pub(super) fn point_at(disk: &Disk, run: &Path, step: u64) -> Result<()> {
    let checkpoints = run.join(CHECKPOINTS);
    let latest = checkpoints.join(LATEST);
    let partial = checkpoints.join(format!("{LATEST}{PARTIAL}"));
    disk.write_file(&partial, format!("{}\n", name_of(step)).as_bytes())?;
    disk.rename(&partial, &latest)?;
    disk.sync_folder(&checkpoints)
}

/// The checkpoint that `path` stands for: itself, or, if it is a run's folder, the newest.
///
/// # Errors
/// If there is none, or `latest` names one that is not there.
pub(super) fn find(path: &Path) -> Result<PathBuf> {
    let bad = |path: &Path, what: String| Error::Checkpoint { path: path.into(), what };
    if path.join(STATE).is_file() {
        return Ok(path.to_owned());
    }
    let checkpoints = path.join(CHECKPOINTS);
    if !checkpoints.is_dir() {
        let what = format!(
            "is neither a checkpoint (with {STATE}) nor the folder of a run (with {CHECKPOINTS}/)"
        );
        return Err(bad(path, what));
    }
    let steps = steps_in(&checkpoints)?;
    let latest = checkpoints.join(LATEST);
    if !latest.exists() {
        let newest = steps.last().map(|step| checkpoints.join(name_of(*step)));
        return newest.ok_or_else(|| bad(&checkpoints, "has no whole checkpoint yet".into()));
    }
    let mut text = String::new();
    let file = File::open(&latest).map_err(io_error("open", &latest))?;
    let read = file.take(NAME_BYTES_MAX).read_to_string(&mut text);
    read.map_err(io_error("read", &latest))?;
    let step = step_of(text.trim_end())
        .ok_or_else(|| bad(&latest, "holds no name such as step-000100".into()))?;
    if !steps.contains(&step) {
        let all: Vec<String> = steps.iter().map(|step| name_of(*step)).collect();
        let what = format!(
            "names {}, which is not there; give one of these folders itself: {}",
            name_of(step),
            all.join(", ")
        );
        return Err(bad(&latest, what));
    }
    Ok(checkpoints.join(name_of(step)))
}

/// The folder of the run that a checkpoint lies in, if it lies in one.
pub(super) fn run_of(checkpoint: &Path) -> Option<&Path> {
    let checkpoints = checkpoint.parent()?;
    let named = checkpoint.file_name()?.to_str().and_then(step_of).is_some();
    (named && checkpoints.ends_with(CHECKPOINTS)).then(|| checkpoints.parent())?
}
