//! `metrics.jsonl`: one JSON object per line.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

const METRICS: &str = "metrics.jsonl";

/// The file of a run's metrics, which lines are appended to.
pub(super) struct Metrics {
    file: io::BufWriter<File>,
    path: PathBuf,
}

#[derive(Deserialize)]
struct AnyLine {
    step: u64,
    eval_loss: Option<f64>,
}

/// Whether the metrics in `folder` have an evaluation after `step` steps.
pub(super) fn is_evaluated(folder: &Path, step: u64) -> bool {
    let Ok(file) = File::open(folder.join(METRICS)) else { return false };
    let lines = BufReader::new(file).split(b'\n').map_while(io::Result::ok);
    let known = lines.map_while(|line| serde_json::from_slice::<AnyLine>(&line).ok());
    known.take_while(|line| line.step <= step).any(|l| l.step == step && l.eval_loss.is_some())
}

impl Metrics {
    /// A file in `folder` that goes on behind the lines of the first `steps` steps. What a run that
    /// was killed wrote after its last checkpoint is cut off: those steps will be done again.
    pub fn open(folder: &Path, steps: u64) -> Result<Metrics> {
        let path = folder.join(METRICS);
        let open = || {
            let mut options = OpenOptions::new();
            let file = options.read(true).write(true).create(true).truncate(false).open(&path)?;
            let kept = bytes_of_steps(&file, steps)?;
            file.set_len(kept)?;
            let mut file = file;
            file.seek(SeekFrom::Start(kept))?;
            Ok(file)
        };
        let file: io::Result<File> = open();
        let file =
            file.map_err(|source| Error::Io { action: "open", path: path.clone(), source })?;
        Ok(Metrics { file: io::BufWriter::new(file), path })
    }

    /// Writes a line so that who follows the file sees it at once.
    pub fn write(&mut self, line: &impl Serialize) -> Result<()> {
        let written = serde_json::to_writer(&mut self.file, line)
            .map_err(io::Error::from)
            .and_then(|()| self.file.write_all(b"\n"))
            .and_then(|()| self.file.flush());
        let path = &self.path;
        written.map_err(|source| Error::Io { action: "write", path: path.clone(), source })
    }
}

/// Bytes of the lines up to the first that is half written or of a later step.
fn bytes_of_steps(file: &File, steps: u64) -> io::Result<u64> {
    let mut reader = BufReader::new(file);
    let (mut kept, mut line) = (0, Vec::new());
    loop {
        line.clear();
        let bytes = reader.read_until(b'\n', &mut line)?;
        let known: Option<AnyLine> = serde_json::from_slice(&line).ok();
        if !line.ends_with(b"\n") || known.is_none_or(|line| line.step > steps) {
            return Ok(kept);
        }
        kept += bytes as u64;
    }
}
