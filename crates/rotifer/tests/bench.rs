//! Benchmarks: the largest model within a limit is exactly that.

#![allow(missing_docs, reason = "test names are claims")]

use rotifer::bench::{self, CapacityOptions, CapacityRow, Found, Search, Variant, Verified};
use rotifer::config::Config;
use tempfile::TempDir;

const CONFIG: &str = r#"
[model]
context = 8
width = 12
layers = 1
heads = 3
[data]
train = "DATA"
[train]
steps = 2
batch = 4
[optimizer]
lr = 1e-3
"#;

fn with_config(f: impl Fn(&Config)) {
    let folder = TempDir::new().expect("a temporary folder");
    let data = folder.path().join("text.txt");
    std::fs::write(&data, "to be or not to be ".repeat(20)).expect("a file");
    let text = CONFIG.replace("DATA", data.to_str().expect("a path of UTF-8"));
    f(&Config::parse(&text, "tiny.toml".as_ref(), &[]).expect("a config"));
}

fn search(config: &Config, variant: Variant, ranks: usize, bytes: u64, verify: bool) -> Search {
    let options =
        CapacityOptions { ranks: vec![ranks], variants: vec![variant], bytes, verify, cores: 1 };
    let mut report = bench::capacity(config, &options, &|_: &CapacityRow| ()).expect("a search");
    report.rows.remove(0).search
}

fn found(search: Search) -> Found {
    match search {
        Search::Found(found) => found,
        other => panic!("{other:?}"),
    }
}

/// The limit at which a model just fits is the bytes that its ranks allocate: `verify` trains it
/// and compares.
#[test]
fn one_byte_less_costs_one_layer() {
    with_config(|config| {
        for variant in [Variant::Rtp, Variant::RtpCopy, Variant::RtpInplace] {
            for ranks in [1, 2, 3, 4] {
                let what = format!("{variant} on {ranks} ranks");
                let some = found(search(config, variant, ranks, 600_000, true));
                assert!(some.layers > 3 && some.peak.total <= 600_000, "{what}: {some:?}");
                assert!(matches!(some.verified, Some(Verified::Trained { .. })), "{some:?}");
                let exact = found(search(config, variant, ranks, some.peak.total, false));
                assert_eq!((exact.layers, exact.peak), (some.layers, some.peak), "{what}");
                let less = found(search(config, variant, ranks, some.peak.total - 1, false));
                assert_eq!(less.layers, some.layers - 1, "{what}");
            }
        }
    });
}

#[test]
fn a_limit_below_one_layer_tells_what_one_needs() {
    with_config(|config| {
        let Search::TooSmall(needs) = search(config, Variant::Rtp, 2, 1000, false) else {
            panic!("1000 bytes are too few");
        };
        let one = found(search(config, Variant::Rtp, 2, needs.total, true));
        assert_eq!((one.layers, one.peak), (1, needs));
    });
}

#[test]
fn more_ranks_than_rows_are_not_possible() {
    with_config(|config| {
        let Search::NotPossible(cause) = search(config, Variant::Rtp, 5, 1 << 20, false) else {
            panic!("5 ranks cannot share 4 rows");
        };
        assert!(cause.contains("5 ranks cannot share train.batch = 4 rows"), "{cause}");
    });
}
