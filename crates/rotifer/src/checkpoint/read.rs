//! The files that hold a model's weights, or its optimiser states, open for reading.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;
use serde::Deserialize;

use super::WEIGHTS_STEM;
use super::disk::io_error;
use super::header::{self, Entry, shortened};
use super::plan::{INDEX_SUFFIX, Stored};
use super::rank_file::Mover;
use crate::error::{Error, Result};

/// Longest index that is read. A thousand tensors take 100 kB.
const INDEX_BYTES_MAX: u64 = 16 << 20;

/// Which file holds which tensor.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Open files, and where the tensors are in them.
pub(super) struct Files {
    /// What to name if a tensor is in none of them.
    whole: PathBuf,
    files: Vec<(PathBuf, File)>,
    tensors: BTreeMap<String, (usize, Entry)>,
}

impl Files {
    /// Opens `STEM.safetensors` of a folder, or the files that its index names if it has one.
    pub fn open(folder: &Path, stem: &str) -> Result<Files> {
        let (whole, names) = names(folder, stem)?;
        let mut opened = Files { whole, files: Vec::new(), tensors: BTreeMap::new() };
        for (name, wanted) in names {
            let path = folder.join(name);
            let file = File::open(&path).map_err(io_error("open", &path))?;
            let mut found = header::read(&file, &path)?;
            let number = opened.files.len();
            match wanted {
                None => {
                    let all = found.into_iter().map(|(name, entry)| (name, (number, entry)));
                    opened.tensors.extend(all);
                }
                Some(wanted) => {
                    for name in wanted {
                        let Some(entry) = found.remove(&name) else {
                            let name = shortened(&name);
                            let what =
                                format!("tensor {name} is missing, which the index has here");
                            return Err(Error::Checkpoint { path, what });
                        };
                        opened.tensors.insert(name, (number, entry));
                    }
                }
            }
            opened.files.push((path, file));
        }
        Ok(opened)
    }

    /// Reads this rank's pieces of `tensors`, all of which must be there in the right shape.
    pub fn fetch(&self, tensors: &[Stored<'_>], mover: &mut Mover<'_>) -> Result<()> {
        for tensor in tensors {
            let (file, entry) = self.place(tensor)?;
            mover.fetch(file, tensor, entry.start)?;
        }
        Ok(())
    }

    fn place(&self, tensor: &Stored<'_>) -> Result<((&File, &Path), &Entry)> {
        let Stored { name, param, .. } = tensor;
        let Some((number, entry)) = self.tensors.get(name) else {
            let what = format!("tensor {name} is missing");
            return Err(Error::Checkpoint { path: self.whole.clone(), what });
        };
        let (path, file) = &self.files[*number];
        let Entry { dtype, shape, .. } = entry;
        if *dtype != Dtype::F32 || *shape != param.shape() {
            let what = format!(
                "tensor {name} is {dtype:?} {shape:?}, but the model has F32 {:?}",
                param.shape()
            );
            return Err(Error::Checkpoint { path: path.clone(), what });
        }
        Ok(((file, path), entry))
    }
}

/// A file's name, and which tensors an index says are in it.
type Named = (String, Option<Vec<String>>);

/// What says which tensors there are, and the files with what an index says of each.
fn names(folder: &Path, stem: &str) -> Result<(PathBuf, Vec<Named>)> {
    let index = folder.join(format!("{stem}{INDEX_SUFFIX}"));
    let single = format!("{stem}.safetensors");
    if !index.exists() {
        return Ok((folder.join(&single), vec![(single, None)]));
    }
    let bad = |what: String| Error::Checkpoint { path: index.clone(), what };
    let file = File::open(&index).map_err(io_error("open", &index))?;
    let mut text = Vec::new();
    file.take(INDEX_BYTES_MAX + 1).read_to_end(&mut text).map_err(io_error("read", &index))?;
    if text.len() as u64 > INDEX_BYTES_MAX {
        return Err(bad(format!("is longer than {INDEX_BYTES_MAX} bytes")));
    }
    let Index { weight_map } = serde_json::from_slice(&text)
        .map_err(|e| bad(format!("is no index of safetensors files: {e}")))?;
    let mut files: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (tensor, file) in weight_map {
        if Path::new(&file).file_name().is_none_or(|name| name != file.as_str()) {
            let (tensor, file) = (shortened(&tensor), shortened(&file));
            return Err(bad(format!("has tensor {tensor} in {file:?}, no file of its folder")));
        }
        files.entry(file).or_default().push(tensor);
    }
    Ok((index, files.into_iter().map(|(file, tensors)| (file, Some(tensors))).collect()))
}

/// Bytes of all files of a folder's weights, and the file to name if they are too few.
///
/// # Errors
/// If a file is missing, or the index is damaged.
pub fn weights_bytes(folder: &Path) -> Result<(PathBuf, u64)> {
    let (whole, names) = names(folder, WEIGHTS_STEM)?;
    let mut bytes = 0;
    for (name, _) in names {
        let path = folder.join(name);
        bytes += fs::metadata(&path).map_err(io_error("open", &path))?.len();
    }
    Ok((whole, bytes))
}
