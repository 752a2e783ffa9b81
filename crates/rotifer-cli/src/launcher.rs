//! Whether a launcher of many processes started this one.

use std::env;
use std::fmt;

/// A launcher, by the variable in which it tells each process how many there are.
struct Launcher {
    variable: &'static str,
    name: &'static str,
}

/// Of Slurm it is the number of tasks of the step: the number of tasks of the job is also set in a
/// batch script, which runs once.
const LAUNCHERS: [Launcher; 3] = [
    Launcher { variable: "OMPI_COMM_WORLD_SIZE", name: "mpirun (Open MPI)" },
    Launcher { variable: "PMI_SIZE", name: "mpiexec (MPICH or Intel MPI)" },
    Launcher { variable: "SLURM_STEP_NUM_TASKS", name: "srun" },
];

/// Several processes were started, which know nothing of each other.
#[derive(Debug, PartialEq, Eq)]
pub struct Apart {
    launcher: &'static str,
    processes: usize,
}

impl fmt::Display for Apart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Apart { launcher, processes } = self;
        write!(
            f,
            "{launcher} started {processes} processes of rotifer, but this build has no transport \
             between processes: each would do the whole work on its own. Start it once, without \
             the launcher, and let --ranks {processes} run the ranks as threads"
        )
    }
}

/// Whether this process may run on its own.
///
/// # Errors
/// If a launcher started it as one of several.
pub fn check() -> Result<(), Apart> {
    check_in(|variable| env::var(variable).ok())
}

fn check_in(value: impl Fn(&str) -> Option<String>) -> Result<(), Apart> {
    for Launcher { variable, name } in LAUNCHERS {
        let processes = value(variable).and_then(|text| text.trim().parse().ok()).unwrap_or(1);
        if processes > 1 {
            return Err(Apart { launcher: name, processes });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_of_several_processes_is_stopped() {
        assert_eq!(check_in(|_| None), Ok(()));
        for Launcher { variable, name } in LAUNCHERS {
            let set =
                |to: &'static str| move |asked: &str| (asked == variable).then(|| to.to_owned());
            assert_eq!(check_in(set("1")), Ok(()));
            assert_eq!(check_in(set("4")), Err(Apart { launcher: name, processes: 4 }));
        }
        let batch_script = |asked: &str| (asked == "SLURM_NTASKS").then(|| "4".to_owned());
        assert_eq!(check_in(batch_script), Ok(()));
    }
}
