//! The command, run in a folder of its own.

#![allow(dead_code, missing_docs, reason = "shared by test binaries that each use a part")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

/// Sizes that divide by nothing, and two ranks of one thread.
const CONFIG: &str = r#"
[model]
context = 16
width = 20
layers = 1
heads = 5

[data]
train = "text.txt"
validation_fraction = 0.1

[train]
steps = 4
batch = 6
eval_every = 2

[optimizer]
lr = 1e-2

[ranks]
count = 2
threads = 1
"#;

/// A folder with `tiny.toml` and its `text.txt`.
pub struct Place(TempDir);

/// What a run left.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Ran {
        let text = |bytes| String::from_utf8(bytes).expect("the command writes text");
        let (stdout, stderr) = (text(output.stdout), text(output.stderr));
        Ran { code: output.status.code(), stdout, stderr }
    }
}

impl Place {
    pub fn new() -> Place {
        let place = Place(TempDir::new().expect("a temporary folder"));
        place.write("tiny.toml", CONFIG);
        place.write("text.txt", "The quick brown fox jumps over the lazy dog.\n".repeat(100));
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(name), content).expect("a temporary folder can be written");
    }

    pub fn read(&self, name: &str) -> String {
        String::from_utf8(self.bytes(name)).expect("text")
    }

    pub fn bytes(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// Everything in the folder, at any depth, sorted.
    pub fn listing(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        list(self.0.path(), &mut found);
        found.sort();
        found
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rotifer"));
        command.args(args).current_dir(self.0.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub fn run(&self, args: &[&str]) -> Ran {
        self.command(args).output().expect("the command starts").into()
    }

    /// Runs what must work; returns what it printed.
    pub fn works(&self, args: &[&str]) -> String {
        let ran = self.run(args);
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{args:?}: {}", ran.stdout);
        ran.stdout
    }

    /// Runs what must be refused with one line that has all of `parts`, before anything is printed
    /// or written.
    pub fn refuses(&self, args: &[&str], parts: &[&str]) {
        let before = self.listing();
        let ran = self.run(args);
        let Ran { code, stdout, stderr } = &ran;
        assert_eq!((*code, stdout.as_str()), (Some(1), ""), "{args:?}: {stderr}");
        assert!(stderr.starts_with("error: ") && stderr.lines().count() == 1, "{args:?}: {stderr}");
        for part in parts {
            assert!(stderr.contains(part), "{args:?}: no {part:?} in {stderr}");
        }
        assert_eq!(self.listing(), before, "{args:?} leaves nothing behind");
    }
}

fn list(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            list(&path, found);
        }
        found.push(path);
    }
}
