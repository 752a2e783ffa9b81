//! `rotifer bench` and `rotifer bench capacity`: what they measure, print and write.

#![allow(missing_docs, reason = "test names are claims")]

mod common;

use common::Place;
use serde_json::Value;

fn json(place: &Place, name: &str) -> Value {
    serde_json::from_str(&place.read(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn number(value: &Value, path: &str) -> f64 {
    let found = value.pointer(path).and_then(Value::as_f64);
    found.unwrap_or_else(|| panic!("{path} of {value} is a number"))
}

fn sum(value: &Value, parts: &[&str]) -> f64 {
    parts.iter().map(|part| number(value, part)).sum()
}

fn rows(report: &Value) -> &Vec<Value> {
    report["rows"].as_array().expect("rows")
}

/// Elements of a block of `tiny.toml` (matrices, their biases, two norms; the shapes stand in
/// `tests/train.rs`), and of all that is around the blocks (two tables and a norm).
const BLOCK: u64 = (4 * 400 + 2 * 1600) + (60 + 20 + 80 + 20) + 2 * 40;
const AROUND: u64 = (257 + 16) * 20 + 40;

/// Five heads divide by neither 2 nor 3, so tp is possible on one rank at most.
const ARGS: [&str; 10] = [
    "bench",
    "tiny.toml",
    "--ranks",
    "3,1,2",
    "--strategy",
    "rtp,rtp-copy,rtp-inplace,tp",
    "--rounds",
    "2",
    "--steps",
    "2",
];

#[test]
fn all_strategies_do_the_same_work_and_the_figures_add_up() {
    let place = Place::new();
    place.works(&[&ARGS[..], &["--json", "out.json"]].concat());
    let report = json(&place, "out.json");
    for (key, value) in [("format", 1), ("rounds", 2), ("steps", 2), ("batch", 6), ("seq", 16)] {
        assert_eq!(report[key], value, "{key}");
    }
    assert_eq!(report["config"], "tiny");
    assert_eq!(report["rotifer"], env!("CARGO_PKG_VERSION"));
    // 4 x 20^2 + 2 x 20 x 80 in the block, 257 x 20 in the head; attention.
    assert_eq!(number(&report, "/flops_per_token"), 6.0 * (4800.0 + 5140.0 + 20.0 * 16.0));
    assert_eq!(report["parameters"], BLOCK + AROUND);
    let ranks: Vec<f64> = rows(&report).iter().map(|row| number(row, "/ranks")).collect();
    assert_eq!(ranks, [1., 1., 1., 1., 2., 2., 2., 2., 3., 3., 3., 3.]);
    let measured: Vec<&Value> =
        rows(&report).iter().filter(|row| row.get("measured").is_some()).collect();
    let loss = number(measured[0], "/measured/loss");
    for row in &measured {
        check_row(row, &report);
        // Four steps of rounding in f32, at losses of about 5.
        assert!((number(row, "/measured/loss") - loss).abs() < 1e-5, "{row}");
    }
    for row in rows(&report).iter().filter(|row| row["strategy"] == "tp" && row["ranks"] != 1) {
        assert!(row["not_possible"].as_str().is_some_and(|cause| cause.len() > 10), "{row}");
        assert!(row.get("measured").is_none(), "{row}");
    }
}

/// What holds for every row that was measured.
fn check_row(row: &Value, report: &Value) {
    let (of, ranks) = (&row["measured"], number(row, "/ranks"));
    let [min, median, max] =
        ["min", "median", "max"].map(|which| number(of, &format!("/tokens_per_sec/{which}")));
    assert!(0.0 < min && min <= median && median <= max, "{row}");
    let step = &of["step"];
    let parts = sum(step, &["/compute_secs", "/exposed_secs", "/other_secs"]);
    let secs = number(step, "/secs");
    assert!((parts - secs).abs() < 1e-6, "{parts} s are {secs} s: {row}");
    // A full batch of 6 rows of 16 targets.
    assert!((median * secs / 96.0 - 1.0).abs() < 1e-9, "{row}");
    let kernels = step["kernels_secs"].as_object().expect("kernels").iter();
    let computing = kernels.filter(|(kind, _)| *kind != "copy").filter_map(|(_, s)| s.as_f64());
    assert!((computing.sum::<f64>() - number(step, "/compute_secs")).abs() < 1e-6, "{row}");
    let purposes = ["/weights", "/gradients", "/optimizer", "/activations", "/travel", "/scratch"];
    let total = number(of, "/peak/total");
    assert_eq!(sum(&of["peak"], &purposes), total, "{row}");
    let ratio = total * ranks / number(report, "/one_rank/total");
    assert!((number(of, "/peak_ratio") - ratio).abs() < 1e-9, "{row}");
    let moved = sum(&of["moved"], &["/weights", "/gradients", "/collectives"]);
    assert_eq!(moved > 0.0, ranks > 1.0, "{row}");
    let world = report["worlds"].as_array().expect("worlds");
    let world = world.iter().find(|world| world["ranks"] == row["ranks"]).expect("its world");
    let speed = median * number(report, "/flops_per_token");
    let utilisation = speed / number(world, "/gemm_flops_per_sec");
    assert!((number(of, "/flop_utilisation") / utilisation - 1.0).abs() < 1e-9, "{row}");
    assert_eq!(world["threads"], 1, "as the config says");
    assert!(of["overlap_efficiency"].is_null(), "there is no link: {row}");
}

#[test]
fn a_log_has_a_line_per_measurement_and_closing_tables() {
    let place = Place::new();
    let printed = place.works(&ARGS);
    assert!(!printed.contains(['\x1b', '\r']), "{printed:?}");
    for what in ["round 1  rtp on 1 rank(s): ", "round 2  rtp-inplace on 3 rank(s): "] {
        assert_eq!(printed.matches(what).count(), 1, "{what} in {printed}");
    }
    assert!(printed.contains("medians of 2 round(s) x 2 step(s) after 1 step(s) of warm-up"));
    assert!(printed.contains("3 rank(s) x 1 thread(s) on "), "{printed}");
    assert!(printed.contains("global batch 6 x 16"), "{printed}");
    let columns = [
        "ranks strategy tokens/s min max step ms compute exposed other MFU % loss",
        "ranks strategy MiB per rank x N / one weights gradients optimizer activations travel \
         scratch MiB sent: weights gradients collectives",
    ];
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let lines: Vec<String> = printed.lines().map(words).collect();
    for column in columns {
        assert!(lines.iter().any(|line| line == column), "no {column} in {printed}");
    }
    // Both tables say why.
    let not_possible = lines.iter().filter(|line| line.starts_with("2 tp not possible: ")).count();
    assert_eq!(not_possible, 2, "{printed}");
    assert_eq!(lines.iter().filter(|line| line.starts_with("3 rtp-copy ")).count(), 2);
}

#[test]
fn the_chart_is_well_formed_and_names_all_that_it_shows() {
    let place = Place::new();
    place.works(&[&ARGS[..], &["--svg", "out.svg"]].concat());
    let text = place.read("out.svg");
    let chart = roxmltree::Document::parse(&text).expect("well-formed XML");
    assert_eq!(chart.root_element().tag_name().name(), "svg");
    let elements = |tag| chart.descendants().filter(move |node| node.has_tag_name(tag));
    let words: Vec<&str> = elements("text").filter_map(|node| node.text()).map(str::trim).collect();
    let wanted = [
        "rtp",
        "rtp-copy",
        "rtp-inplace",
        "tp",
        "one rank / N",
        "tokens/s",
        "MiB per rank",
        "ranks",
    ];
    for word in wanted {
        assert!(words.contains(&word), "no {word} among {words:?}");
    }
    assert!(words.iter().any(|word| word.starts_with("tiny: ")), "the title is among {words:?}");
    for rank in ["1", "2", "3"] {
        let ticks = words.iter().filter(|word| **word == rank).count();
        assert_eq!(ticks, 2, "tick {rank} in both panels");
    }
    // Nine cases that are always possible, in two panels; four colours in the legend.
    assert!(elements("rect").count() >= 2 * 9 + 4);
}

#[test]
fn a_simulated_link_makes_hops_take_time() {
    let place = Place::new();
    // 10 ms for each of at least 8 messages of a step: far more than this model computes.
    let link = ["--link-gbps", "100", "--link-latency-us", "10000", "--strategy", "rtp"];
    let rest = ["--ranks", "2", "--rounds", "1", "--steps", "1", "--json", "out.json"];
    let printed = place.works(&[&["bench", "tiny.toml"], &link[..], &rest].concat());
    assert!(printed.contains("a simulated link of 100 Gbit/s, 10000 us"), "{printed}");
    assert!(printed.contains("link hidden  link exposed  hidden %"), "{printed}");
    let report = json(&place, "out.json");
    assert_eq!((number(&report, "/link/gbps"), number(&report, "/link/latency_us")), (1e2, 1e4));
    let row = &rows(&report)[0]["measured"];
    assert!(number(row, "/step/exposed_secs") > 0.02, "{row}");
    // Only copies take a link.
    assert!(number(row, "/peak/travel") > 0.0, "{row}");
    let efficiency = row["overlap_efficiency"].as_f64();
    assert!(efficiency.is_none_or(|part| (0.0..=1.0).contains(&part)), "{row}");
}

#[test]
fn capacity_grows_with_the_ranks() {
    let place = Place::new();
    let args = ["bench", "capacity", "tiny.toml", "--ranks", "1,2,3", "--strategy", "rtp,tp"];
    let more = ["--bytes", "500KiB", "--verify", "--json", "out.json"];
    let printed = place.works(&[&args[..], &more].concat());
    assert!(printed.contains("tiny: the most layers within 500.0 KiB per rank"), "{printed}");
    assert!(printed.contains("rtp on 3 rank(s): trained one step in "), "{printed}");
    let report = json(&place, "out.json");
    assert_eq!(report["bytes_limit"], 500 << 10);
    let rtp: Vec<&Value> =
        rows(&report).iter().filter(|row| row["strategy"] == "rtp").map(|r| &r["found"]).collect();
    let layers: Vec<f64> = rtp.iter().map(|found| number(found, "/layers")).collect();
    // More than twice and three times: the tables and the head are shared as well.
    assert!(layers[1] > 2.0 * layers[0] && layers[2] > 3.0 * layers[0], "{layers:?}");
    for found in rtp {
        assert!(number(found, "/peak/total") <= 512_000.0, "{found}");
        assert!(number(found, "/verified/trained/loss") > 1.0, "{found}");
        let layers = found["layers"].as_u64().expect("a number of layers");
        assert_eq!(found["parameters"], layers * BLOCK + AROUND);
    }
}

#[test]
fn a_limit_without_room_for_a_layer_says_what_one_needs() {
    let place = Place::new();
    let args = ["bench", "capacity", "tiny.toml", "--ranks", "2", "--strategy", "rtp"];
    let printed = place.works(&[&args[..], &["--bytes", "10KiB"]].concat());
    assert!(printed.contains("not even one layer fits: it needs "), "{printed}");
    assert!(printed.contains(" KiB per rank\n"), "{printed}");
}
