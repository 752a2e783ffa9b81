//! Every change that a save makes to the file system, in one place, so that a test can end it at
//! any byte.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};

/// The file system that checkpoints are written to.
///
/// One that [dies](Disk::dying_after) is what a killed process leaves behind: what was written
/// before stays, everything later fails, cleaning up included. Tests save on it.
#[derive(Debug, Default)]
pub struct Disk {
    /// Changes until it dies; `None` if it does not.
    left: Option<AtomicU64>,
}

impl Disk {
    /// The file system as it is.
    #[must_use]
    pub const fn new() -> Disk {
        Disk { left: None }
    }

    /// A file system that dies after so many changes: each byte written is one, and so is each
    /// file or folder that is created, renamed, synced or removed.
    #[must_use]
    pub const fn dying_after(changes: u64) -> Disk {
        Disk { left: Some(AtomicU64::new(changes)) }
    }

    /// Changes that are left to one that dies.
    #[must_use]
    pub fn left(&self) -> Option<u64> {
        self.left.as_ref().map(|left| left.load(Ordering::SeqCst))
    }

    /// Takes up to `wanted` changes; returns how many there were.
    fn spend(&self, wanted: u64) -> u64 {
        let Some(left) = &self.left else { return wanted };
        let spend = |now: u64| Some(now - now.min(wanted));
        // The closure always returns a value, so this always is `Ok`.
        let (Ok(before) | Err(before)) =
            left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, spend);
        before.min(wanted)
    }

    fn change<T>(
        &self,
        action: &'static str,
        path: &Path,
        change: impl FnOnce() -> io::Result<T>,
    ) -> Result<T> {
        if self.spend(1) == 0 {
            return Err(io_error(action, path)(io::Error::other("the disk has died")));
        }
        change().map_err(io_error(action, path))
    }

    /// Creates a folder and those above it.
    pub(super) fn create_folder(&self, path: &Path) -> Result<()> {
        self.change("create folder", path, || fs::create_dir_all(path))
    }

    /// Creates a file of `bytes` zeros, or empties one that exists first.
    pub(super) fn create(&self, path: &Path, bytes: u64) -> Result<File> {
        self.change("create", path, || {
            let mut options = OpenOptions::new();
            let file = options.read(true).write(true).create(true).truncate(true).open(path)?;
            file.set_len(bytes)?;
            Ok(file)
        })
    }

    /// Writes all of `bytes` from byte `at` on.
    pub(super) fn write(&self, file: &File, path: &Path, bytes: &[u8], at: u64) -> Result<()> {
        let granted = self.spend(bytes.len() as u64) as usize;
        let written = file.write_all_at(&bytes[..granted], at);
        let written = written.and_then(|()| match granted == bytes.len() {
            true => Ok(()),
            false => Err(io::Error::other("the disk has died")),
        });
        written.map_err(io_error("write", path))
    }

    /// Makes what was written to a file, or which files are in a folder, durable.
    pub(super) fn sync(&self, file: &File, path: &Path) -> Result<()> {
        self.change("sync", path, || file.sync_all())
    }

    /// [`sync`](Disk::sync) of a folder.
    pub(super) fn sync_folder(&self, path: &Path) -> Result<()> {
        self.change("sync", path, || File::open(path)?.sync_all())
    }

    /// Creates a small file with this content, durable but for its name.
    pub(super) fn write_file(&self, path: &Path, content: &[u8]) -> Result<()> {
        let file = self.create(path, 0)?;
        self.write(&file, path, content, 0)?;
        self.sync(&file, path)
    }

    /// Renames; a file of the new name is replaced.
    pub(super) fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.change("rename", from, || fs::rename(from, to))
    }

    /// Removes a file.
    pub(super) fn remove(&self, path: &Path) -> Result<()> {
        self.change("remove", path, || fs::remove_file(path))
    }

    /// Removes a folder and the files in it, one after the other.
    pub(super) fn remove_folder(&self, path: &Path) -> Result<()> {
        for entry in fs::read_dir(path).map_err(io_error("read folder", path))? {
            let file = entry.map_err(io_error("read folder", path))?.path();
            self.remove(&file)?;
        }
        self.change("remove", path, || fs::remove_dir(path))
    }
}

/// What to make of an error of the operating system.
pub(super) fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { action, path, source }
}
