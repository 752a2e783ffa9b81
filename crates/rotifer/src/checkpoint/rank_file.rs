//! One rank's bytes on their way between device and files, through one buffer of fixed size.

use std::fs::File;
use std::io;
use std::iter::StepBy;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rotifer_device::{Device, Region};

use super::Disk;
use super::disk::io_error;
use super::plan::Stored;
use crate::error::{Error, Result};
use crate::params::Layout;

/// Elements that are between device and file at once. Half of the buffer has them as numbers, the
/// other half as the file's bytes: 4 MiB in all.
const BUFFER: usize = 1 << 19;

/// Moves a rank's pieces of tensors to and from files.
pub(super) struct Mover<'a> {
    dev: &'a dyn Device,
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

impl<'a> Mover<'a> {
    pub fn new(dev: &'a dyn Device) -> Mover<'a> {
        // At full size from the start: growing would hold an old and a new buffer at once.
        let (values, bytes) = (Vec::with_capacity(BUFFER), Vec::with_capacity(4 * BUFFER));
        Mover { dev, values, bytes }
    }

    /// Writes this rank's pieces of a tensor whose first byte is `start`.
    pub fn store(
        &mut self,
        disk: &Disk,
        (file, path): (&File, &Path),
        tensor: &Stored<'_>,
        start: u64,
    ) -> Result<()> {
        each_run(tensor, start, &mut |run| {
            self.values.resize(run.region.len(), 0.0);
            self.dev.read_f32(run.region, &mut self.values);
            for (at, places) in run.stretches() {
                self.bytes.clear();
                self.bytes.extend(places.flat_map(|i| self.values[i].to_le_bytes()));
                disk.write(file, path, &self.bytes, at)?;
            }
            Ok(())
        })
    }

    /// Reads this rank's pieces of a tensor whose first byte is `start`.
    pub fn fetch(
        &mut self,
        (file, path): (&File, &Path),
        tensor: &Stored<'_>,
        start: u64,
    ) -> Result<()> {
        each_run(tensor, start, &mut |run| {
            self.values.resize(run.region.len(), 0.0);
            for (at, places) in run.stretches() {
                self.bytes.resize(places.len() * 4, 0);
                file.read_exact_at(&mut self.bytes, at).map_err(|source| {
                    if source.kind() == io::ErrorKind::UnexpectedEof {
                        let what = format!("ends within tensor {}", tensor.name);
                        Error::Checkpoint { path: path.into(), what }
                    } else {
                        io_error("read", path)(source)
                    }
                })?;
                let (values, _) = self.bytes.as_chunks::<4>();
                for (i, value) in places.zip(values) {
                    self.values[i] = f32::from_le_bytes(*value);
                }
            }
            self.dev.write_f32(&self.values, run.region);
            Ok(())
        })
    }
}

/// Calls `f` for runs of rows of this rank's pieces that fit the buffer.
fn each_run(tensor: &Stored<'_>, start: u64, f: &mut dyn FnMut(&Run) -> Result<()>) -> Result<()> {
    let param = tensor.param;
    let width = param.width;
    let step = (BUFFER / width.max(1)).max(1);
    let transposed = (param.layout == Layout::Transposed).then_some(param.rows);
    for piece in &param.pieces {
        let (rows, region) = (piece.rows.len(), tensor.content.region(piece));
        for at in (0..rows).step_by(step) {
            let end = (at + step).min(rows);
            let row = piece.rows.start + at;
            let before = if transposed.is_some() { row } else { row * width };
            f(&Run {
                region: region.slice(at * width..end * width),
                rows: end - at,
                width,
                start: start + 4 * before as u64,
                transposed,
            })?;
        }
    }
    Ok(())
}
