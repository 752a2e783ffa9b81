//! From the entries of a config to files.

use std::fs;
use std::path::{Path, PathBuf};

use super::Error;

/// A file that marks caches (bford.info/cachedir): build outputs and the like, nobody's text.
const CACHE_TAG: &str = "CACHEDIR.TAG";

/// A file to read.
#[derive(Debug)]
pub(super) struct Found {
    pub path: PathBuf,
    /// Whether the config names this very file, so that an empty one is a mistake.
    pub named: bool,
}

/// The files of one entry: a file, a folder (all that is in it, sorted) or a glob.
pub(super) fn find(entry: &str) -> Result<Vec<Found>, Error> {
    let path = Path::new(entry);
    let found = if path.is_dir() {
        let mut files = Vec::new();
        walk(path, &mut files)?;
        files
    } else if !path.exists() && entry.contains(['*', '?', '[']) {
        matches(entry)?
    } else if path.exists() {
        return Ok(vec![Found { path: path.to_owned(), named: true }]);
    } else {
        return Err(Error::Missing { path: path.to_owned() });
    };
    if found.is_empty() {
        return Err(Error::NoMatch { entry: entry.to_owned() });
    }
    Ok(found.into_iter().map(|path| Found { path, named: false }).collect())
}

/// The files that a glob matches, in the alphabetical order of the `glob` crate. Hidden files are
/// taken only if the pattern spells out their dot, as in a shell.
fn matches(pattern: &str) -> Result<Vec<PathBuf>, Error> {
    let options = glob::MatchOptions { require_literal_leading_dot: true, ..Default::default() };
    let paths = glob::glob_with(pattern, options)
        .map_err(|source| Error::Pattern { pattern: pattern.to_owned(), source })?;
    let mut files = Vec::new();
    for path in paths {
        let path = path.map_err(|e| Error::Io { path: e.path().to_owned(), source: e.into() })?;
        if path.is_file() {
            files.push(path);
        }
    }
    Ok(files)
}

/// Appends the files below `folder`, sorted by name at each level, without hidden ones and caches.
/// Links to folders are not followed: they may lead back here.
fn walk(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), Error> {
    let broken = |source| Error::Io { path: folder.to_owned(), source };
    if folder.join(CACHE_TAG).exists() {
        return Ok(());
    }
    let entries: Result<Vec<_>, _> = fs::read_dir(folder).map_err(broken)?.collect();
    let mut entries = entries.map_err(broken)?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let path = entry.path();
        if entry.file_type().map_err(broken)?.is_dir() {
            walk(&path, files)?;
        } else if path.is_file() {
            files.push(path);
        }
    }
    Ok(())
}
