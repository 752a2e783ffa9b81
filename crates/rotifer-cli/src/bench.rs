//! `rotifer bench` and `rotifer bench capacity`.

mod chart;
mod progress;
mod tables;

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use rotifer::bench::{self, CapacityOptions, Options, Variant};
use rotifer::config::Config;
use rotifer::{Error, Result};
use serde::Serialize;

use crate::cores;
use progress::Progress;

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct BenchArgs {
    #[command(subcommand)]
    command: Option<BenchCommand>,
    /// The config, a TOML file: its model, data and global batch are the same for all strategies
    #[arg(required = true)]
    config: Option<PathBuf>,
    #[command(flatten)]
    cases: Cases,
    /// How often each strategy is measured, in turn with the others
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// Steps of each measurement that count
    #[arg(long, value_name = "N", default_value_t = 3)]
    steps: usize,
    /// Steps before those, which do not count
    #[arg(long, value_name = "N", default_value_t = 1)]
    warmup: usize,
    /// Copy what travels between ranks over a simulated link of this speed, each way
    /// `[config: ranks.link_gbps]`
    #[arg(long, value_name = "GBPS")]
    link_gbps: Option<f64>,
    /// Latency of that link in microseconds `[config: ranks.link_latency_us]`
    #[arg(long, value_name = "US")]
    link_latency_us: Option<f64>,
    /// Draw tokens/s and bytes per rank
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

#[derive(Subcommand)]
enum BenchCommand {
    /// Find the most layers that each strategy can train within a limit of bytes per rank
    Capacity(CapacityArgs),
}

#[derive(Args)]
struct CapacityArgs {
    /// The config, a TOML file; all but model.layers stays as it says
    config: PathBuf,
    #[command(flatten)]
    cases: Cases,
    /// Most bytes of one rank, such as 512MiB or 1.5GiB
    #[arg(long)]
    bytes: String,
    /// Train one step of each model that is found
    #[arg(long)]
    verify: bool,
}

/// What both commands ask for.
#[derive(Args)]
struct Cases {
    /// Numbers of ranks, as threads of this process, such as 1,2,4 `[config: ranks.count]`
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    ranks: Vec<usize>,
    /// Some of rtp, rtp-copy, rtp-inplace, ddp, zero1, fsdp, fsdp-keep and tp, such as rtp,fsdp;
    /// all leaves out rtp-copy and fsdp-keep
    #[arg(long, value_name = "LIST", default_value = "all")]
    strategy: String,
    /// Threads per rank `[config: ranks.threads; default: cores / ranks]`
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Override a key of the config, as in --set train.batch=8; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Write all figures as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Cases {
    /// The config with the overrides, these ones last.
    fn config(&self, path: &Path, more: impl IntoIterator<Item = String>) -> Result<Config> {
        let mut overrides = self.set.clone();
        overrides.extend(self.threads.map(|n| format!("ranks.threads={n}")));
        overrides.extend(more);
        Ok(Config::load(path, &overrides)?)
    }

    fn ranks(&self, config: &Config) -> Vec<usize> {
        if self.ranks.is_empty() { vec![config.ranks.count] } else { self.ranks.clone() }
    }
}

pub fn run(args: &BenchArgs) -> Result<()> {
    match (&args.command, &args.config) {
        (Some(BenchCommand::Capacity(args)), _) => capacity(args),
        (None, Some(path)) => compare(args, path),
        (None, None) => unreachable!("clap asks for the config"),
    }
}

fn compare(args: &BenchArgs, path: &Path) -> Result<()> {
    let link = [("link_gbps", args.link_gbps), ("link_latency_us", args.link_latency_us)];
    let mut overrides = Vec::new();
    for (key, value) in link {
        overrides.extend(value.map(|value| format!("ranks.{key}={value}")));
    }
    if !overrides.is_empty() {
        overrides.push("ranks.hop=copy".into());
    }
    let config = args.cases.config(path, overrides)?;
    let options = Options {
        ranks: args.cases.ranks(&config),
        variants: Variant::parse_list(&args.cases.strategy)?,
        rounds: args.rounds,
        warmup: args.warmup,
        steps: args.steps,
        cores: cores(),
    };
    for file in [&args.cases.json, &args.svg].into_iter().flatten() {
        require_folder(file)?;
    }
    let progress = Progress::new();
    let report = bench::run(&config, &options, &progress)?;
    progress.clear();
    // Printed first: what was measured is not lost if a file cannot be written.
    print!("{}", tables::report(&report));
    if let Some(file) = &args.cases.json {
        write_json(file, &report)?;
    }
    if let Some(file) = &args.svg {
        let io = |source| Error::Io { action: "draw", path: file.clone(), source };
        write(file, &chart::svg(&report).map_err(io)?)?;
    }
    Ok(())
}

fn capacity(args: &CapacityArgs) -> Result<()> {
    let config = args.cases.config(&args.config, [])?;
    let options = CapacityOptions {
        ranks: args.cases.ranks(&config),
        variants: Variant::parse_list(&args.cases.strategy)?,
        bytes: bench::parse_bytes(&args.bytes)?,
        verify: args.verify,
        cores: cores(),
    };
    if let Some(file) = &args.cases.json {
        require_folder(file)?;
    }
    let cases = options.ranks.len() * options.variants.len();
    let progress = Progress::new();
    let report = bench::capacity(&config, &options, &|row| progress.searched(row, cases))?;
    progress.clear();
    print!("{}", tables::capacity(&report));
    if let Some(file) = &args.cases.json {
        write_json(file, &report)?;
    }
    Ok(())
}

/// Refuses a file that could not be written, before minutes are spent on what it is for.
fn require_folder(file: &Path) -> Result<()> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    let checked = match folder {
        Some(folder) => fs::read_dir(folder).map(drop),
        None => Ok(()),
    };
    let checked = checked.and_then(|()| match file.is_dir() {
        true => Err(std::io::ErrorKind::IsADirectory.into()),
        false => Ok(()),
    });
    checked.map_err(|source| Error::Io { action: "write", path: file.to_owned(), source })
}

fn write_json(file: &Path, report: &impl Serialize) -> Result<()> {
    let mut json = serde_json::to_string_pretty(report).expect("a report has string keys only");
    json.push('\n');
    write(file, &json)
}

fn write(file: &Path, text: &str) -> Result<()> {
    let io = |source| Error::Io { action: "write", path: file.to_owned(), source };
    fs::write(file, text).map_err(io)?;
    println!("wrote {}", file.display());
    Ok(())
}
