//! The closing tables of a benchmark.

use std::fmt::Write;

use rotifer::bench::{
    Bytes, CapacityReport, Found, LAYERS_MAX, Measured, Outcome, Report, Row, Search, Verified,
};

use crate::table::{bytes, count};

/// Time, then memory, by number of ranks and strategy.
pub fn report(report: &Report) -> String {
    let mut out = String::new();
    let link = report.link.map(|l| {
        format!(", shards over a simulated link of {} Gbit/s, {} us", l.gbps, l.latency_us)
    });
    let _ = writeln!(
        out,
        "\n{}: {} parameters, global batch {} x {}{}\nmedians of {} round(s) x {} step(s) after {} \
         step(s) of warm-up; ms are rank 0's in the median step",
        report.config,
        count(report.parameters),
        report.batch,
        report.seq,
        link.unwrap_or_default(),
        report.rounds,
        report.steps,
        report.warmup
    );
    for world in &report.worlds {
        let (ranks, threads, cores) = (world.ranks, world.threads, report.cores);
        let speed = world.gemm_flops_per_sec.map(|f| format!("; products {:.1} GFLOP/s", f / 1e9));
        let crowded = if ranks * threads > cores { " (ranks wait for a core)" } else { "" };
        let _ = writeln!(
            out,
            "{ranks} rank(s) x {threads} thread(s) on {cores} core(s){crowded}{}",
            speed.unwrap_or_default()
        );
    }
    let head = ["ranks", "strategy"];
    let linked = report.link.is_some();
    out.push_str(&block(&head, &time_columns(linked), report, |m| time(m, linked)));
    out.push_str(&block(&head, &MEMORY_COLUMNS, report, memory));
    out
}

fn time_columns(linked: bool) -> Vec<&'static str> {
    let mut columns = vec!["tokens/s", "min", "max", "step ms", "compute", "exposed", "other"];
    if linked {
        columns.extend(["link hidden", "link exposed", "hidden %"]);
    }
    columns.extend(["MFU %", "loss"]);
    columns
}

fn time(m: &Measured, linked: bool) -> Vec<String> {
    let (speed, step) = (&m.tokens_per_sec, &m.step);
    let ms = |secs: f64| format!("{:.1}", secs * 1e3);
    let mut cells: Vec<String> =
        [speed.median, speed.min, speed.max].map(|x| format!("{x:.0}")).into();
    let split = [step.secs, step.compute_secs, step.exposed_secs, step.other_secs];
    cells.extend(split.map(ms));
    if linked {
        cells.extend([step.link_hidden_secs, step.link_exposed_secs].map(ms));
        let percent = |part: f64| format!("{:.0}", part * 100.0);
        cells.push(m.overlap_efficiency.map_or("-".into(), percent));
    }
    cells.extend([format!("{:.0}", m.flop_utilisation * 100.0), format!("{:.5}", m.loss)]);
    cells
}

const MEMORY_COLUMNS: [&str; 11] = [
    "MiB per rank",
    "x N / one",
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "travel",
    "scratch",
    "MiB sent: weights",
    "gradients",
    "collectives",
];

fn memory(m: &Measured) -> Vec<String> {
    let Bytes { weights, gradients, optimizer, activations, travel, scratch, total } = m.peak;
    let mib = |bytes: u64| format!("{:.1}", bytes as f64 / f64::from(1 << 20));
    let mut cells = vec![mib(total), format!("{:.3}", m.peak_ratio)];
    cells.extend([weights, gradients, optimizer, activations, travel, scratch].map(mib));
    cells.extend([m.moved.weights, m.moved.gradients, m.moved.collectives].map(mib));
    cells
}

/// A table of the report's rows.
fn block(
    head: &[&str],
    columns: &[&str],
    report: &Report,
    cells: impl Fn(&Measured) -> Vec<String>,
) -> String {
    let rows = report.rows.iter().map(|row: &Row| {
        let names = vec![row.ranks.to_string(), row.strategy.to_string()];
        match &row.outcome {
            Outcome::Measured(measured) => [names, cells(measured)].concat(),
            Outcome::NotPossible(cause) => [names, vec![format!("not possible: {cause}")]].concat(),
        }
    });
    let head: Vec<String> = head.iter().chain(columns).map(|&name| name.to_owned()).collect();
    aligned(&[vec![head], rows.collect()].concat())
}

/// Rows under the head that comes first, with the columns aligned: the second to the left, as it
/// has names, numbers to the right. A row that is shorter than the head ends in words, which no
/// column has to make room for.
fn aligned(rows: &[Vec<String>]) -> String {
    let full = || rows.iter().filter(|row| row.len() == rows[0].len());
    let width = |column: usize| full().map(|row| row[column].len()).max().unwrap_or(0);
    let mut out = String::from("\n");
    for row in rows {
        let words = if row.len() < rows[0].len() { row.len() - 1 } else { row.len() };
        for (column, cell) in row.iter().enumerate() {
            let gap = if column == 0 { "" } else { "  " };
            let _ = match column {
                _ if column == words => write!(out, "{gap}{cell}"),
                1 => write!(out, "{gap}{cell:<0$}", width(column).max(NAME_WIDTH)),
                _ => write!(out, "{gap}{cell:>0$}", width(column)),
            };
        }
        out.push('\n');
    }
    out
}

/// Of the longest strategy, so that rows without numbers line up as well.
const NAME_WIDTH: usize = "rtp-inplace".len();

/// The most layers within a limit, by number of ranks and strategy.
pub fn capacity(report: &CapacityReport) -> String {
    let head = ["ranks", "strategy", "layers", "parameters", "bytes per rank"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let mut verified = String::new();
    for row in &report.rows {
        let mut cells = vec![row.ranks.to_string(), row.strategy.to_string()];
        match &row.search {
            Search::Found(found) => {
                cells.extend([
                    layers(found),
                    count(found.parameters),
                    found.peak.total.to_string(),
                ]);
                let who = format!("{} on {} rank(s)", row.strategy, row.ranks);
                verified += &one_step(&who, found);
            }
            Search::TooSmall(needs) => {
                let needs = bytes(needs.total);
                cells.push(format!("not even one layer fits: it needs {needs} per rank"));
            }
            Search::NotPossible(cause) => cells.push(format!("not possible: {cause}")),
        }
        rows.push(cells);
    }
    let limit = bytes(report.bytes_limit);
    let table = aligned(&rows);
    format!("\n{}: the most layers within {limit} per rank\n{table}{verified}", report.config)
}

fn layers(found: &Found) -> String {
    let more = if found.layers == LAYERS_MAX { ">= " } else { "" };
    format!("{more}{}", found.layers)
}

/// What came of training one step of a model, as a line.
fn one_step(who: &str, found: &Found) -> String {
    match &found.verified {
        None => String::new(),
        Some(Verified::Trained { loss, step_secs }) => {
            format!("{who}: trained one step in {step_secs:.2} s, loss {loss:.4}\n")
        }
        Some(Verified::Failed(cause)) => format!("{who}: {cause}\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::aligned;

    #[test]
    fn columns_are_as_wide_as_their_widest_number() {
        let rows = [
            vec!["ranks", "strategy", "x", "bytes"],
            vec!["1", "rtp", "1234", "5"],
            vec!["12", "tp", "not possible: heads do not divide"],
        ];
        let rows = rows.map(|row| row.into_iter().map(str::to_owned).collect());
        let expected = "\n\
            ranks  strategy        x  bytes\n    \
            1  rtp          1234      5\n   \
            12  tp           not possible: heads do not divide\n";
        assert_eq!(aligned(&rows), expected);
    }
}
