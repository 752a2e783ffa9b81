//! The closing tables.

use std::fmt::Write;

use rotifer::session::Summary;
use rotifer_device::{KernelKind, Purpose};

/// A number of bytes in the largest unit that leaves three figures.
pub fn bytes(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", units[unit]) }
}

/// A count with thousands and millions cut to a letter.
pub fn count(n: u64) -> String {
    match n {
        0..10_000 => n.to_string(),
        10_000..10_000_000 => format!("{:.1} k", n as f64 / 1e3),
        _ => format!("{:.1} M", n as f64 / 1e6),
    }
}

/// Bytes per rank by purpose, beside a single rank's bytes divided by N.
pub fn memory(summary: &Summary) -> String {
    let ranks = summary.ranks;
    let mut out = String::new();
    let share = format!("one rank / {ranks}");
    let _ = writeln!(out, "\n{:<12} {:>14} {:>14} {:>7}", "bytes", "per rank", share, "ratio");
    let rows = Purpose::ALL.map(|p| (p.name(), summary.plan.bytes(p), summary.one_rank.bytes(p)));
    let all = ("in all", summary.plan.total(), summary.one_rank.total());
    for (name, mine, single) in rows.into_iter().chain([all]) {
        let share = single as f64 / ranks as f64;
        let ratio = if single == 0 { "-".into() } else { format!("{:.3}", mine as f64 / share) };
        let _ = writeln!(out, "{name:<12} {mine:>14} {:>14.0} {ratio:>7}", share);
    }
    out
}

/// Where the time of rank 0 went.
pub fn profile(summary: &Summary) -> String {
    let mut out = String::new();
    let total = summary.train_secs.max(f64::MIN_POSITIVE);
    let mut rows: Vec<(String, f64)> = KernelKind::ALL
        .iter()
        .map(|k| (format!("{k:?}").to_lowercase(), summary.profile[*k as usize].as_secs_f64()))
        .collect();
    rows.push(("waiting".into(), summary.waited.as_secs_f64()));
    let rest = total - rows.iter().map(|(_, secs)| secs).sum::<f64>();
    rows.push(("other".into(), rest.max(0.0)));
    rows.sort_by(|a, b| b.1.total_cmp(&a.1));
    let _ = writeln!(
        out,
        "\n{:<12} {:>10} {:>7}   (rank 0, {} steps)",
        "time", "seconds", "%", summary.steps
    );
    for (name, secs) in rows {
        let _ = writeln!(out, "{name:<12} {secs:>10.3} {:>7.1}", 100.0 * secs / total);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_the_unit_that_leaves_few_figures() {
        let shown = [0, 1023, 1024, 1536, 5 << 30].map(bytes);
        assert_eq!(shown, ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 GiB"]);
    }

    #[test]
    fn counts_are_cut_to_a_letter() {
        assert_eq!([9_999, 12_345, 124_439_808].map(count), ["9999", "12.3 k", "124.4 M"]);
    }
}
