//! Data against a plain list of all its tokens, and what its errors say.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use rotifer::config::Config;
use rotifer::data::{ByteTokenizer, Dataset, Error, Options, Order, Shuffle, StreamDecoder};

const END: i32 = ByteTokenizer::END_OF_TEXT;

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        Folder(tempfile::tempdir().expect("a temporary folder"))
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().expect("below the folder")).expect("a folder can be made");
        fs::write(&path, bytes).expect("the folder can be written");
        path
    }

    fn entry(&self, name: &str) -> String {
        self.0.path().join(name).to_str().expect("temporary folders have plain names").to_owned()
    }

    fn open(&self, names: &[&str], options: &Options) -> Result<Dataset, Error> {
        let entries: Vec<String> = names.iter().map(|name| self.entry(name)).collect();
        Dataset::open(&entries, options)
    }

    fn text(&self, names: &[&str]) -> Dataset {
        self.open(names, &Options::default()).unwrap_or_else(|e| panic!("{e}"))
    }

    fn error(&self, names: &[&str], options: &Options) -> Error {
        self.open(names, options).expect_err("this data is wrong")
    }
}

fn bin(vocab_size: usize) -> Options {
    Options { vocab_size: Some(vocab_size), ..Options::default() }
}

fn says(error: &Error, parts: &[&str]) {
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
}

/// One document as the tokens that it should become.
fn tokens(documents: &[&str]) -> Vec<i32> {
    documents.iter().flat_map(|d| d.bytes().map(i32::from).chain([END])).collect()
}

fn little_endian(ids: &[u16]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

/// Every token of a dataset, read through its windows.
fn all_tokens(data: &Dataset) -> Vec<i32> {
    let (mut inputs, mut targets) = ([0], [0]);
    let mut all = Vec::new();
    for window in 0..data.num_windows(1) {
        data.window(window, 1, &mut inputs, &mut targets, None);
        all.push(inputs[0]);
    }
    all.push(targets[0]);
    all
}

/// Every window of `data` against the plain list.
fn check_windows(data: &Dataset, all: &[i32], seq: usize, end: Option<i32>) {
    assert_eq!(data.len_tokens(), all.len() as u64);
    assert_eq!(data.num_windows(seq), (all.len().saturating_sub(1)).div_ceil(seq) as u64);
    let mut targets_seen = 0;
    for window in 0..data.num_windows(seq) {
        let (mut inputs, mut targets) = (vec![7; seq], vec![7; seq]);
        let mut documents = vec![7; seq];
        let wanted = end.is_some().then_some(&mut documents[..]);
        data.window(window, seq, &mut inputs, &mut targets, wanted);
        let at = |j: usize| all.get(window as usize * seq + j).copied();
        for j in 0..seq {
            assert_eq!(inputs[j], at(j).unwrap_or(end.unwrap_or(0)), "input {j} of {window}");
            assert_eq!(targets[j], at(j + 1).unwrap_or(-1), "target {j} of {window}");
            let before = inputs[..j].iter().filter(|&&t| Some(t) == end).count() as i32;
            assert!(end.is_none() || documents[j] == before, "document {j} of {window}");
        }
        let count = targets.iter().filter(|&&t| t >= 0).count();
        assert_eq!(count, data.num_targets(window, seq));
        targets_seen += count;
    }
    assert_eq!(targets_seen, all.len().saturating_sub(1), "every token but the first is a target");
    assert_eq!(data.num_targets(data.num_windows(seq), seq), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn windows_hold_what_a_plain_list_holds(
        files in prop::collection::vec(
            (any::<bool>(), prop::collection::vec("[aé\n☃]{0,9}", 1..4)), 1..6,
        ),
        seq in 1usize..40,
    ) {
        let folder = Folder::new();
        let mut all = Vec::new();
        let mut names = Vec::new();
        for (i, (is_jsonl, texts)) in files.iter().enumerate() {
            if *is_jsonl {
                let line = |t: &String| serde_json::json!({ "id": 1, "text": t }).to_string();
                let lines: Vec<String> = texts.iter().map(line).collect();
                names.push(format!("{i}.jsonl"));
                folder.write(&names[i], lines.join("\n"));
                let texts = texts.iter().map(String::as_str).filter(|t| !t.is_empty());
                all.extend(tokens(&texts.collect::<Vec<_>>()));
            } else {
                let text = format!("{}.", texts[0]);
                names.push(format!("{i}.txt"));
                folder.write(&names[i], &text);
                all.extend(tokens(&[&text]));
            }
        }
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        match folder.open(&names, &Options::default()) {
            Ok(data) => check_windows(&data, &all, seq, Some(END)),
            Err(e) => prop_assert!(all.is_empty() && matches!(e, Error::NoTokens { .. }), "{}", e),
        }
    }

    #[test]
    fn bin_windows_hold_what_a_plain_list_holds(
        files in prop::collection::vec(prop::collection::vec(0u16..300, 1..60), 1..4),
        seq in 1usize..30,
        has_end in any::<bool>(),
        fraction in 0.0..=1.0f64,
    ) {
        let folder = Folder::new();
        for (i, ids) in files.iter().enumerate() {
            folder.write(&format!("{i}.bin"), little_endian(ids));
        }
        let end = has_end.then_some(5);
        let options = Options { end_of_text: end.map(|e| e as u32), ..bin(300) };
        let data = folder.open(&["*.bin"], &options).expect("all ids are below 300");
        let all: Vec<i32> = files.concat().into_iter().map(i32::from).collect();
        check_windows(&data, &all, seq, end);
        // Both sides of a cut, which windows do not cross.
        let cut = all.len() - (all.len() as f64 * fraction).round() as usize;
        let (rest, tail) = data.split(fraction);
        check_windows(&rest, &all[..cut], seq, end);
        check_windows(&tail, &all[cut..], seq, end);
    }

    #[test]
    fn a_shuffle_is_a_bijection(n in 1u64..5000, seed in any::<u64>(), epoch in any::<u64>()) {
        let shuffle = Shuffle::new(n, seed, epoch);
        let mut seen = vec![false; n as usize];
        for i in 0..n {
            prop_assert!(!std::mem::replace(&mut seen[shuffle.at(i) as usize], true));
        }
    }

    #[test]
    fn every_epoch_has_every_window_once(
        n in 1u64..300,
        seed in any::<u64>(),
        epoch in 0u64..1000,
        shuffle in any::<bool>(),
    ) {
        let order = Order::new(n, seed, shuffle);
        let mut epoch: Vec<u64> = (epoch * n..(epoch + 1) * n).map(|i| order.sample(i)).collect();
        epoch.sort_unstable();
        prop_assert_eq!(epoch, (0..n).collect::<Vec<_>>());
    }

    #[test]
    fn streams_decode_as_whole_texts_do(bytes in prop::collection::vec(
        prop_oneof![any::<u8>(), 0x80u8..=0xf8, Just(0xe2u8), Just(0x98u8)], 0..40,
    )) {
        let tokens: Vec<i32> = bytes.iter().map(|&b| b.into()).collect();
        prop_assert_eq!(ByteTokenizer::decode(&tokens), String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn text_survives_the_tokenizer(text in ".*") {
        prop_assert_eq!(ByteTokenizer::decode(&ByteTokenizer::encode(&text)), text);
    }
}

#[test]
fn characters_appear_when_they_are_complete() {
    let (mut decoder, mut text) = (StreamDecoder::default(), String::new());
    let mut lengths = Vec::new();
    for token in ByteTokenizer::encode("a☃").into_iter().chain([0xe2, END, 300]) {
        decoder.push(token, &mut text);
        lengths.push(text.chars().count());
    }
    assert_eq!((text.as_str(), lengths), ("a☃\u{fffd}\u{fffd}", vec![1, 1, 1, 2, 2, 3, 4]));
}

#[test]
fn epochs_and_seeds_have_different_orders() {
    let order = |seed, epoch| {
        let shuffle = Shuffle::new(1000, seed, epoch);
        (0..1000).map(|i| shuffle.at(i)).collect::<Vec<_>>()
    };
    let (a, b, c) = (order(1, 0), order(1, 1), order(2, 0));
    // A random pair of orders agrees in one place on average, in 8 or more once in 100,000.
    for (x, y) in [(&a, &b), (&a, &c), (&b, &c), (&order(0, 1), &order(1, 0))] {
        assert!(x.iter().zip(y).filter(|(x, y)| x == y).count() < 8);
    }
    assert_eq!(order(1, 1), b);
}

#[test]
fn small_shuffles_reach_every_place_equally() {
    // Where 0 and 9 of 10 go in 10,000 epochs: 1000 each, standard deviation 30; 5 are allowed.
    for i in [0, 9] {
        let mut counts = [0; 10];
        for epoch in 0..10_000 {
            counts[Shuffle::new(10, 3, epoch).at(i) as usize] += 1;
        }
        assert!(counts.iter().all(|c| (850..=1150).contains(c)), "{counts:?}");
    }
}

#[test]
fn shuffles_of_any_size_stay_inside() {
    for n in [1, 2, 3, 4, 5, (1 << 40) + 1, u64::MAX] {
        let shuffle = Shuffle::new(n, 9, 9);
        assert!([0, n / 2, n - 1].iter().all(|&i| shuffle.at(i) < n));
    }
}

#[test]
fn folders_are_sorted_and_leave_out_hidden_files_and_caches() {
    let folder = Folder::new();
    folder.write("b/2.txt", "two");
    folder.write("b/1.rs", "one");
    folder.write("a.txt", "zero");
    folder.write("c.jsonl", "{\"text\": \"three\"}\n\n");
    folder.write("d/empty.txt", "");
    folder.write(".hidden", [0xff]);
    folder.write(".git/x", [0xff]);
    folder.write("target/CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55");
    folder.write("target/x.rs", "not text of ours");
    let expected = tokens(&["zero", "one", "two", "three"]);
    assert_eq!(all_tokens(&folder.text(&[""])), expected);
    assert_eq!(all_tokens(&folder.text(&["b/*.txt", "a.txt"])), tokens(&["two", "zero"]));
    assert_eq!(all_tokens(&folder.text(&["**/*.txt"])), tokens(&["zero", "two"]));
    // A name with the letters of a glob is a name first.
    folder.write("[x].txt", "brackets");
    assert_eq!(all_tokens(&folder.text(&["[x].txt"])), tokens(&["brackets"]));
}

#[test]
fn large_texts_are_mapped_and_read_alike() {
    let folder = Folder::new();
    let large = "0123456789abcdef".repeat(1 << 16) + "☃";
    folder.write("1.txt", "before");
    folder.write("2.txt", &large);
    folder.write("3.txt", "after");
    let data = folder.text(&["*.txt"]);
    check_windows(&data, &tokens(&["before", &large, "after"]), 1000, Some(END));
}

#[test]
fn ranks_share_a_dataset() {
    fn shared<T: Send + Sync + Clone>(_: &T) {}
    let folder = Folder::new();
    folder.write("a.txt", "text");
    let data = folder.text(&["a.txt"]);
    shared(&data);
    assert!(data.is_text());
    assert_eq!(data.end_of_text(), Some(END));
}

#[test]
fn what_is_not_there_is_named() {
    let folder = Folder::new();
    fs::create_dir(folder.0.path().join("empty")).expect("a folder can be made");
    folder.write("empty.txt", "");
    folder.write("empty.jsonl", "\n{\"text\": \"\"}\n");
    let error = |name: &str| folder.error(&[name], &Options::default());
    assert!(matches!(error("none.txt"), Error::Missing { path } if path.ends_with("none.txt")));
    assert!(matches!(error("*.md"), Error::NoMatch { entry } if entry.ends_with("*.md")));
    assert!(matches!(error("empty"), Error::NoMatch { .. }));
    assert!(matches!(error("a[.txt"), Error::Pattern { .. }));
    assert!(matches!(error("empty.txt"), Error::Empty { path } if path.ends_with("empty.txt")));
    assert!(matches!(error("*.txt"), Error::NoTokens { .. }));
    assert!(matches!(error("empty.jsonl"), Error::NoTokens { .. }));
}

#[test]
fn bytes_that_are_no_text_are_named_by_offset() {
    let folder = Folder::new();
    folder.write("sub/bad.txt", b"good \xff bad");
    for entry in ["sub/bad.txt", "sub", "sub/*"] {
        let error = folder.error(&[entry], &Options::default());
        assert!(matches!(&error, Error::NotUtf8 { path, offset: 5 } if path.ends_with("bad.txt")));
        says(&error, &["byte 5", "glob"]);
    }
}

#[test]
fn jsonl_errors_name_the_line_and_the_fields() {
    let folder = Folder::new();
    let good = "{\"text\": \"a\"}\n\n";
    for (i, (bad, says_what)) in [
        ("{\"text\": ", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ("{\"body\": \"x\", \"id\": 1}", "body, id"),
        ("{\"text\": 3}", "no text in field \"text\""),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("{i}.jsonl");
        folder.write(&name, format!("{good}{bad}\n"));
        says(&folder.error(&[&name], &Options::default()), &[&name, "line 3", says_what]);
    }
    folder.write("body.jsonl", "{\"body\": \"\\u00e9\\n\"}\r\n");
    let options = Options { text_field: "body".to_owned(), ..Options::default() };
    let data = folder.open(&["body.jsonl"], &options).expect("the field is there");
    assert_eq!(all_tokens(&data), tokens(&["é\n"]));
}

#[test]
fn bin_errors_name_the_position() {
    let folder = Folder::new();
    let mut ids = vec![9; 10_000];
    ids[9_000] = 10;
    folder.write("ids.bin", little_endian(&ids));
    folder.write("odd.bin", [1, 0, 2]);
    folder.write("a.txt", "text");
    assert!(folder.open(&["ids.bin"], &bin(11)).is_ok());
    says(&folder.error(&["ids.bin"], &bin(10)), &["token 10", "position 9000", "vocab_size is 10"]);
    says(&folder.error(&["odd.bin"], &bin(10)), &["odd.bin", "3 bytes"]);
    says(&folder.error(&["ids.bin"], &Options::default()), &["set model.vocab_size"]);
    says(&folder.error(&["ids.bin", "a.txt"], &bin(300)), &["ids.bin", "a.txt", "only one"]);
    let end = |id| Options { end_of_text: Some(id), ..bin(300) };
    says(&folder.error(&["ids.bin"], &end(300)), &["data.end_of_text is 300", "smaller"]);
    says(&folder.error(&["a.txt"], &end(5)), &["data.end_of_text is 5", "256"]);
    says(&folder.error(&["a.txt"], &bin(256)), &["vocab_size is 256", "257 tokens"]);
}

#[test]
#[should_panic(expected = "window 3 of 3")]
fn a_window_beyond_the_last_is_a_bug() {
    let folder = Folder::new();
    folder.write("a.txt", "0123456789");
    let (mut inputs, mut targets) = ([0; 4], [0; 4]);
    folder.text(&["a.txt"]).window(3, 4, &mut inputs, &mut targets, None);
}

/// A config over files of `folder`.
fn config(folder: &Folder, overrides: &[&str]) -> Config {
    let text = format!(
        "[model]\ncontext = 4\nwidth = 8\nlayers = 1\nheads = 1\n[data]\ntrain = {:?}\n\
         [train]\nsteps = 1\nbatch = 8\n[optimizer]\nlr = 1.0\n",
        folder.entry("a.txt")
    );
    let overrides: Vec<String> = overrides.iter().map(|&s| s.to_owned()).collect();
    Config::parse(&text, Path::new("run.toml"), &overrides).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn a_config_opens_training_and_validation_data() {
    let folder = Folder::new();
    folder.write("a.txt", "0123456789012345678");
    folder.write("v.txt", "val");
    folder.write("v.bin", [1, 0, 2, 0]);
    let splits = config(&folder, &[]).open_data().expect("20 tokens");
    assert_eq!((splits.train.len_tokens(), splits.validation.is_none()), (20, true));
    let splits = config(&folder, &["data.validation_fraction=0.25"]).open_data().expect("15 and 5");
    let lens = [splits.train.len_tokens(), splits.validation.expect("a tail").len_tokens()];
    assert_eq!(lens, [15, 5]);
    let named = |name: &str| format!("data.validation={}", folder.entry(name));
    let splits = config(&folder, &[&named("v.txt")]).open_data().expect("two files");
    assert_eq!(splits.validation.expect("a file").len_tokens(), 4);
    let refused = |overrides: &[&str]| config(&folder, overrides).open_data().expect_err("refused");
    assert!(matches!(refused(&["ranks.count=6"]), Error::FewerWindowsThanRanks { windows: 5, .. }));
    says(&refused(&["ranks.count=6"]), &["training", "20 tokens", "5 sequences of 4", "6 ranks"]);
    says(&refused(&["data.validation_fraction=0.04"]), &["validation data of 1 tokens"]);
    says(&refused(&["model.vocab_size=257", &named("v.bin")]), &["v.bin", "a.txt"]);
    let entry = format!("data.train={}", folder.entry("v.bin"));
    let masked = [entry.as_str(), "model.vocab_size=9", "data.document_mask=true"];
    assert!(matches!(refused(&masked), Error::NoEndOfText));
}
