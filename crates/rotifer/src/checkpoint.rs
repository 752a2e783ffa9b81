//! Weights in a safetensors file with Hugging Face names. Files know no N: each rank writes and
//! reads its own bytes of every tensor at their place in the file, through one buffer of fixed
//! size.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::iter::StepBy;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rotifer_device::{Device, Region};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use crate::error::{Error, Result};
use crate::models::Model;
use crate::params::{Layout, Param, Piece};
use crate::train::Trainer;

/// Elements that are between device and file at once. Half of the buffer has them as numbers, the
/// other half as the file's bytes: 4 MiB in all.
const BUFFER: usize = 1 << 19;

/// Longest header that is believed; safetensors' own limit.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Name of the weights' file in a folder.
pub const WEIGHTS: &str = "model.safetensors";

/// Name of the model's description in a folder.
pub const CONFIG: &str = "config.json";

/// Writes `model.safetensors` into `folder`, which all ranks see. Every rank calls this. The file
/// gets its name when all ranks have written their parts and it is on disk. ([`HfConfig::write`]
/// writes the description beside it.)
///
/// [`HfConfig::write`]: crate::models::HfConfig::write
///
/// # Errors
/// If the folder cannot be written, or a rank fails.
pub fn save<M: Model>(trainer: &Trainer<'_, M>, folder: &Path) -> Result<()> {
    let comm = trainer.comm();
    let partial = folder.join(format!("{WEIGHTS}.partial"));
    let places = places(trainer.params());
    if comm.rank() == 0 {
        std::fs::create_dir_all(folder).map_err(io("create folder", folder))?;
        let file = File::create(&partial).map_err(io("create", &partial))?;
        file.write_all_at(&places.header, 0).map_err(io("write", &partial))?;
        file.set_len(places.bytes).map_err(io("write", &partial))?;
    }
    comm.barrier()?;
    let mut file = RankFile::open(trainer.device(), &partial, true)?;
    for (param, start) in trainer.params().iter().zip(&places.starts) {
        // All ranks have replicated parameters; one writes them.
        if !param.replicated || comm.rank() == 0 {
            for piece in &param.pieces {
                file.each_run(param, piece, *start, &mut RankFile::store)?;
            }
        }
    }
    file.file.sync_all().map_err(io("sync", &partial))?;
    comm.barrier()?;
    if comm.rank() == 0 {
        let path = folder.join(WEIGHTS);
        std::fs::rename(&partial, &path).map_err(io("rename", &path))?;
        let folder_file = File::open(folder).map_err(io("open", folder))?;
        folder_file.sync_all().map_err(io("sync", folder))?;
    }
    comm.barrier()?;
    Ok(())
}

/// Reads the weights of `folder` into the model: each rank its own bytes.
///
/// # Errors
/// If the file is damaged, or its tensors are not the model's: the file and the tensor are named.
pub fn load<M: Model>(trainer: &Trainer<'_, M>, folder: &Path) -> Result<()> {
    let path = folder.join(WEIGHTS);
    let mut file = RankFile::open(trainer.device(), &path, false)?;
    let found = file.tensors()?;
    // No other rank reads this one's weights now: see `Trainer::params`.
    for param in trainer.params() {
        let bad = |what| Error::Checkpoint { path: path.clone(), what };
        let Some((info, start)) = found.get(&param.name) else {
            return Err(bad(format!("tensor {} is missing", param.name)));
        };
        if info.dtype != Dtype::F32 || info.shape != param.shape() {
            return Err(bad(format!(
                "tensor {} is {:?} {:?}, but the model has F32 {:?}",
                param.name,
                info.dtype,
                info.shape,
                param.shape()
            )));
        }
        for piece in &param.pieces {
            file.each_run(param, piece, *start, &mut RankFile::fetch)?;
        }
    }
    trainer.refresh()
}

/// Where each parameter's bytes are in the file.
struct Places {
    /// Length and JSON of the header.
    header: Vec<u8>,
    /// Start of each parameter, from the start of the file.
    starts: Vec<u64>,
    /// Size of the file.
    bytes: u64,
}

fn places(params: &[Param]) -> Places {
    let mut at = 0;
    let mut starts = Vec::new();
    let mut tensors = Vec::new();
    for param in params {
        let end = at + param.len() * size_of::<f32>();
        starts.push(at as u64);
        let info = TensorInfo { dtype: Dtype::F32, shape: param.shape(), data_offsets: (at, end) };
        tensors.push((param.name.clone(), info));
        at = end;
    }
    // `transformers` refuses a file that does not say who may read it.
    let format = [("format".to_owned(), "pt".to_owned())].into_iter().collect();
    let metadata = Metadata::new(Some(format), tensors).expect("tensors lie one behind the other");
    let mut json = serde_json::to_vec(&metadata).expect("metadata is always JSON");
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    let data = header.len() as u64;
    for start in &mut starts {
        *start += data;
    }
    Places { bytes: data + at as u64, header, starts }
}

/// A file as one rank sees it, with its buffers.
struct RankFile<'a> {
    dev: &'a dyn Device,
    file: File,
    path: PathBuf,
    values: Vec<f32>,
    bytes: Vec<u8>,
}

/// Rows of a piece that fit the buffer, and where they belong in the file.
struct Run {
    /// `[rows, width]`
    region: Region,
    rows: usize,
    width: usize,
    /// Byte of row 0, column 0 in the file.
    start: u64,
    /// Rows of the whole tensor if the file holds its transpose.
    transposed: Option<usize>,
}

impl Run {
    /// The stretches that are contiguous in the file: byte where each starts, and which elements of
    /// the region it holds. One for a tensor stored by rows; one per column for a transposed one.
    fn stretches(&self) -> impl Iterator<Item = (u64, StepBy<Range<usize>>)> + use<> {
        let (rows, width, start) = (self.rows, self.width, self.start);
        let (count, whole_rows) = self.transposed.map_or((1, 0), |rows| (width, rows));
        let step = if self.transposed.is_some() { width } else { 1 };
        (0..count)
            .map(move |c| (start + 4 * (c * whole_rows) as u64, (c..rows * width).step_by(step)))
    }
}

impl<'a> RankFile<'a> {
    fn open(dev: &'a dyn Device, path: &Path, write: bool) -> Result<RankFile<'a>> {
        let file = OpenOptions::new().read(true).write(write).open(path);
        let file = file.map_err(io("open", path))?;
        // At full size from the start: growing would hold an old and a new buffer at once.
        let (values, bytes) = (Vec::with_capacity(BUFFER), Vec::with_capacity(4 * BUFFER));
        Ok(RankFile { dev, file, path: path.into(), values, bytes })
    }

    /// Name, shape and start of every tensor of the file.
    fn tensors(&mut self) -> Result<BTreeMap<String, (TensorInfo, u64)>> {
        let bad = |what: String| Error::Checkpoint { path: self.path.clone(), what };
        let size = self.file.metadata().map_err(io("read", &self.path))?.len();
        let mut length = [0; 8];
        self.file.read_exact(&mut length).map_err(|_| bad("has no header".into()))?;
        let length = u64::from_le_bytes(length);
        if length > HEADER_BYTES_MAX || length + 8 > size {
            return Err(bad(format!("a header of {length} bytes does not fit a file of {size}")));
        }
        let mut json = vec![0; length as usize];
        self.file.read_exact(&mut json).map_err(io("read", &self.path))?;
        let metadata: Metadata = serde_json::from_slice(&json)
            .map_err(|e| bad(format!("its header is no safetensors header: {e}")))?;
        let mut found = BTreeMap::new();
        for (name, info) in metadata.tensors() {
            let (start, end) = info.data_offsets;
            let elements = info.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
            let bytes = elements.and_then(|n| n.checked_mul(info.dtype.bitsize() / 8));
            if bytes != end.checked_sub(start) || (end as u64) > size - 8 - length {
                return Err(bad(format!("tensor {name} does not fit the file")));
            }
            found.insert(name, (info.clone(), 8 + length + start as u64));
        }
        Ok(found)
    }

    /// Calls `f` for runs of rows of a piece that fit the buffer.
    fn each_run(
        &mut self,
        param: &Param,
        piece: &Piece,
        start: u64,
        f: &mut dyn FnMut(&mut Self, &Run) -> Result<()>,
    ) -> Result<()> {
        let (rows, width) = (piece.rows.len(), param.width);
        let step = (BUFFER / width).max(1);
        let transposed = (param.layout == Layout::Transposed).then_some(param.rows);
        for at in (0..rows).step_by(step) {
            let end = (at + step).min(rows);
            let row = piece.rows.start + at;
            let before = if transposed.is_some() { row } else { row * width };
            let run = Run {
                region: piece.weights.slice(at * width..end * width),
                rows: end - at,
                width,
                start: start + 4 * before as u64,
                transposed,
            };
            f(self, &run)?;
        }
        Ok(())
    }

    fn store(&mut self, run: &Run) -> Result<()> {
        self.values.resize(run.region.len(), 0.0);
        self.dev.read_f32(run.region, &mut self.values);
        for (at, places) in run.stretches() {
            self.bytes.clear();
            self.bytes.extend(places.flat_map(|i| self.values[i].to_le_bytes()));
            self.file.write_all_at(&self.bytes, at).map_err(io("write", &self.path))?;
        }
        Ok(())
    }

    fn fetch(&mut self, run: &Run) -> Result<()> {
        self.values.resize(run.region.len(), 0.0);
        for (at, places) in run.stretches() {
            self.bytes.resize(places.len() * 4, 0);
            self.file.read_exact_at(&mut self.bytes, at).map_err(io("read", &self.path))?;
            let (values, _) = self.bytes.as_chunks::<4>();
            for (i, value) in places.zip(values) {
                self.values[i] = f32::from_le_bytes(*value);
            }
        }
        self.dev.write_f32(&self.values, run.region);
        Ok(())
    }
}

fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { action, path, source }
}
