//! The `rotifer` command. Arguments, progress and tables; what they show is computed in the
//! library.

mod bench;
mod launcher;
mod progress;
mod table;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};

use clap::{Args, Parser, Subcommand};
use rotifer::Result;
use rotifer::config::Config;
use rotifer::generate::Sampling;
use rotifer::session::{self, GenerateOptions};

/// Trains neural networks across N ranks, each of which holds 1/N of everything.
#[derive(Parser)]
#[command(name = "rotifer", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train the model that a config describes, and write its weights
    Train(TrainArgs),
    /// Continue prompts with a model that `train` wrote
    Generate(GenerateArgs),
    /// Compare strategies: speed, communication and memory, on one model and batch
    Bench(Box<bench::BenchArgs>),
}

#[derive(Args)]
struct TrainArgs {
    /// The config, a TOML file (see configs/quickstart.toml, where every key is explained)
    config: PathBuf,
    /// Number of ranks, as threads of this process `[config: ranks.count]`
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Threads per rank `[config: ranks.threads; default: cores / ranks]`
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Override a key of the config, as in --set train.steps=100; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Go on with a run: its folder, whose newest checkpoint is taken, or one checkpoint's folder.
    /// Ranks, threads, strategy, accumulation and steps may differ from what they were
    #[arg(long, value_name = "DIR")]
    resume: Option<PathBuf>,
    /// At the end, print where the time of a step went
    #[arg(long)]
    profile: bool,
}

#[derive(Args)]
struct GenerateArgs {
    /// Folder with model.safetensors and config.json, as `train` wrote it
    folder: PathBuf,
    /// Text to continue; may be given several times
    #[arg(long, required = true)]
    prompt: Vec<String>,
    /// Most tokens to add to each prompt
    #[arg(long, default_value_t = 200)]
    tokens: usize,
    /// Divides the logits; 0 always takes the most likely token
    #[arg(long, default_value_t = 0.8)]
    temperature: f32,
    /// Choose among the most likely tokens that together have this probability
    #[arg(long, default_value_t = 0.95)]
    top_p: f32,
    /// Seed of the choices
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of ranks, as threads of this process
    #[arg(long, value_name = "N", default_value_t = 1)]
    ranks: usize,
    /// Threads per rank `[default: cores / ranks]`
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    if let Err(apart) = launcher::check() {
        eprintln!("error: {apart}");
        return ExitCode::FAILURE;
    }
    let result = match command {
        Command::Train(args) => train(&args),
        Command::Generate(args) => generate(args),
        Command::Bench(args) => bench::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn train(args: &TrainArgs) -> Result<()> {
    let mut overrides = args.set.clone();
    for (key, value) in [("ranks.count", args.ranks), ("ranks.threads", args.threads)] {
        overrides.extend(value.map(|v| format!("{key}={v}")));
    }
    let config = Config::load(&args.config, &overrides)?;
    let chosen = config.ranks.threads.map(usize::from);
    let threads = chosen.unwrap_or_else(|| threads_per_rank(config.ranks.count));
    let stop = stop_on_signal();
    let progress = progress::Progress::new();
    let summary = match &args.resume {
        Some(from) => session::resume(&config, from, threads, &stop, &progress)?,
        None => session::train(&config, threads, &stop, &progress)?,
    };
    progress.clear();
    print!("{}", table::memory(&summary));
    if args.profile {
        print!("{}", table::profile(&summary));
    }
    if summary.stopped {
        println!("stopped after step {} as asked", summary.steps);
    }
    println!("weights: {}", summary.folder.display());
    Ok(())
}

fn generate(args: GenerateArgs) -> Result<()> {
    let sampling = Sampling {
        tokens: args.tokens,
        temperature: args.temperature,
        top_p: args.top_p,
        seed: args.seed,
        end_of_text: None,
    };
    let threads = args.threads.unwrap_or_else(|| threads_per_rank(args.ranks));
    let one = args.prompt.len() == 1;
    let options = GenerateOptions { prompts: args.prompt, sampling, ranks: args.ranks, threads };
    if one {
        // A single text is shown while it grows, from when there is a model to continue it.
        let begun = Once::new();
        let begin = || begun.call_once(|| print!("{}", options.prompts[0]));
        session::generate(&args.folder, &options, &|_, text| {
            begin();
            print!("{text}");
            let _ = std::io::stdout().flush();
        })?;
        begin();
        println!();
    } else {
        for text in session::generate(&args.folder, &options, &|_, _| ())? {
            println!("{text}\n");
        }
    }
    Ok(())
}

/// The cores, shared among the ranks.
fn threads_per_rank(ranks: usize) -> usize {
    (cores() / ranks.max(1)).max(1)
}

/// The cores that this process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The first Ctrl-C or SIGTERM asks for an end after the step; the second ends the process.
fn stop_on_signal() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let asked = Arc::clone(&stop);
    let handler = ctrlc::set_handler(move || {
        if asked.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        eprintln!("\nending after this step; Ctrl-C again ends at once, without saving");
    });
    if let Err(error) = handler {
        // Training works without; only the orderly end is gone.
        eprintln!("warning: Ctrl-C will end at once, without saving ({error})");
    }
    stop
}
