//! House rules that a machine can keep.

#![allow(missing_docs, reason = "test names are claims")]

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All files below `folder` with this extension, without build outputs.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder of the repository") {
        let path = entry.expect("a folder of the repository").path();
        if path.is_dir() && !path.ends_with("target") && !path.ends_with(".git") {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|e| e == extension) {
            found.push(path);
        }
    }
    found
}

fn sources() -> impl Iterator<Item = (PathBuf, String)> {
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).expect("a source file");
        (path, text)
    };
    let found = files(&root().join("crates"), "rs");
    assert!(found.len() > 30, "the sources are found");
    found.into_iter().map(read)
}

#[test]
fn lines_have_100_columns_and_files_600_lines_at_most() {
    let mut long = Vec::new();
    for (path, text) in sources() {
        let lines = text.lines().count();
        if lines > 600 {
            long.push(format!("{}: {lines} lines", path.display()));
        }
        for (i, line) in text.lines().enumerate().filter(|(_, l)| l.chars().count() > 100) {
            let columns = line.chars().count();
            long.push(format!("{}:{}: {columns} columns", path.display(), i + 1));
        }
    }
    assert!(long.is_empty(), "{long:#?}");
}

#[test]
fn functions_have_70_lines_at_most() {
    for (path, text) in sources() {
        let mut begin = None;
        for (i, line) in text.lines().enumerate() {
            let indent = line.len() - line.trim_start().len();
            let words = line.trim_start();
            let is_fn = words.starts_with("fn ")
                || (words.starts_with("pub")
                    || words.starts_with("const")
                    || words.starts_with("unsafe"))
                    && words.split(['(', '<']).next().is_some_and(|head| head.contains(" fn "));
            if begin.is_none() && is_fn && !line.ends_with(';') {
                begin = Some((i, indent));
            }
            let Some((start, depth)) = begin else { continue };
            if indent == depth && (words == "}" || words.ends_with(" }") || words.ends_with(';')) {
                let lines = i + 1 - start;
                assert!(
                    lines <= 70,
                    "{}:{}: a function of {lines} lines",
                    path.display(),
                    start + 1
                );
                begin = None;
            }
        }
    }
}

#[test]
fn crates_depend_one_way_only() {
    let order = ["rotifer_device", "rotifer_ring", "rotifer", "rotifer_cli"];
    for (path, text) in sources() {
        let own = order.iter().rposition(|name| {
            path.components().any(|c| c.as_os_str() == name.replace('_', "-").as_str())
        });
        let own = own.expect("a file of one of the crates");
        for later in &order[own + 1..] {
            let used = text.contains(&format!("use {later}::"));
            assert!(!used, "{} uses {later}", path.display());
        }
    }
}

#[test]
fn no_machine_is_named() {
    for (path, text) in sources() {
        for (i, line) in text.lines().enumerate() {
            let home = ["/ro", "ot/"].concat();
            let work = ["/wo", "rk/"].concat();
            let named = line.contains(&home) || line.contains(&work);
            assert!(!named, "{}:{}: a path of one machine", path.display(), i + 1);
        }
    }
}

#[test]
fn libraries_read_no_environment() {
    for (path, text) in sources() {
        let library = path.components().any(|c| c.as_os_str() == "src")
            && !path.components().any(|c| c.as_os_str() == "rotifer-cli");
        let reads = text.contains("env::var");
        assert!(!(library && reads), "{} reads the environment", path.display());
    }
}

#[test]
fn every_config_is_valid() {
    let configs = files(&root().join("configs"), "toml");
    assert!(!configs.is_empty());
    for path in configs {
        if let Err(error) = rotifer::config::Config::load(&path, &[]) {
            panic!("{}: {error}", path.display());
        }
    }
}

#[test]
fn every_file_that_the_architecture_names_exists() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let mut folder = PathBuf::new();
    let mut named = 0;
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('`').and_then(|l| l.strip_suffix('`')) {
            folder = root().join("crates").join(name).join("src");
        }
        for name in line.split('`').skip(1).step_by(2) {
            let from_root = name.starts_with("crates/");
            let from_crate = line.starts_with("- ") || line.starts_with("  ");
            if !(name.ends_with(".rs") || name.ends_with('/')) || !(from_root || from_crate) {
                continue;
            }
            let place = if from_root { root().join(name) } else { folder.join(name) };
            // Files of a folder that the same line names first.
            let nested = ["layers", "models", "strategy", "transport", "cpu", "checkpoint"];
            let found = place.exists() || nested.iter().any(|n| folder.join(n).join(name).exists());
            let tests = folder.join("..").join(name).exists();
            assert!(found || tests, "ARCHITECTURE.md names {name}, which does not exist");
            named += 1;
        }
    }
    assert!(named > 20, "the code map is found");
}
