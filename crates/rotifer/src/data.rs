//! Training data: text, JSON Lines or ready-made tokens, cut in windows of equal length.
//!
//! Opening data reads every file once, so that whatever is wrong with it shows before training. The
//! files stay mapped or are held as they are; tokens are widened to 4 bytes only in the window that
//! is asked for. Files must not change while they are open.

mod error;
mod files;
mod order;
mod store;
mod tokenizer;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

pub use error::Error;
pub use order::{Order, Shuffle};
use store::Store;
pub use tokenizer::{ByteTokenizer, StreamDecoder};

/// How to read files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Field of a JSON Lines object that holds the text.
    pub text_field: String,
    /// Size of the model's vocabulary; needed for `.bin` files, the tokenizer's size for text.
    pub vocab_size: Option<usize>,
    /// Token that ends a document of a `.bin` file (50256 for GPT-2's tokenizer), if there is one.
    pub end_of_text: Option<u32>,
}

impl Default for Options {
    fn default() -> Options {
        Options { text_field: "text".to_owned(), vocab_size: None, end_of_text: None }
    }
}

/// A sequence of tokens, shared by all ranks of a process: a clone is a handle.
///
/// For `seq` tokens per window, window i has the inputs `i * seq .. (i + 1) * seq` and, as target
/// of each, the token after it. So every token but the first is a target exactly once; the last
/// window may have fewer.
#[derive(Clone)]
pub struct Dataset {
    store: Arc<Store>,
    range: Range<u64>,
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dataset").field("range", &self.range).finish_non_exhaustive()
    }
}

impl Dataset {
    /// Opens the files of `entries`, in their order. An entry is a file, a folder or a glob.
    ///
    /// A folder stands for all files below it, sorted by name at each level, except hidden ones
    /// and tagged caches (Cargo's `target`); a glob for the files that it matches, sorted. The
    /// extension says what a file is: `.jsonl` has a JSON object per line with a document in its
    /// text field, `.bin` has tokens of 2 bytes, little-endian, as nanoGPT writes them, and any
    /// other file is one document of UTF-8 text. The end-of-text token follows every document;
    /// `.bin` files are taken as they are. Empty documents are left out.
    ///
    /// # Errors
    /// If a file is missing, unreadable or damaged; if one that is named is empty, or all are; if
    /// text and `.bin` are mixed; if the vocabulary is too small. See [`Error`].
    pub fn open(entries: &[String], options: &Options) -> Result<Dataset, Error> {
        let store = Arc::new(Store::open(entries, options)?);
        match store.len() {
            0 => Err(Error::NoTokens { entries: entries.join(", ") }),
            len => Ok(Dataset { store, range: 0..len }),
        }
    }

    /// Cuts off the last `fraction` of the tokens, rounded to a whole number of them, for
    /// validation: (rest, tail).
    ///
    /// # Panics
    /// If the fraction is not in 0..=1.
    #[must_use]
    pub fn split(self, fraction: f64) -> (Dataset, Dataset) {
        assert!((0.0..=1.0).contains(&fraction), "{fraction} is no fraction");
        let tail = (self.len_tokens() as f64 * fraction).round() as u64;
        let cut = self.range.end - tail.min(self.len_tokens());
        let store = Arc::clone(&self.store);
        let rest = Dataset { store, range: self.range.start..cut };
        (rest, Dataset { range: cut..self.range.end, ..self })
    }

    /// Number of tokens.
    #[must_use]
    pub fn len_tokens(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// The token that ends a document: 256 for text, what the options say for `.bin` files.
    #[must_use]
    pub fn end_of_text(&self) -> Option<i32> {
        self.store.end_of_text
    }

    /// Whether these are tokens of [`ByteTokenizer`] and not those of a `.bin` file.
    #[must_use]
    pub fn is_text(&self) -> bool {
        self.store.is_text
    }

    /// Number of windows of `seq` tokens that have at least one target.
    ///
    /// # Panics
    /// If `seq` is 0.
    #[must_use]
    pub fn num_windows(&self, seq: usize) -> u64 {
        self.len_tokens().saturating_sub(1).div_ceil(seq as u64)
    }

    /// Number of targets of a window: `seq`, but for the last one; 0 beyond it.
    #[must_use]
    pub fn num_targets(&self, window: u64, seq: usize) -> usize {
        let before = window.saturating_mul(seq as u64);
        self.len_tokens().saturating_sub(1).saturating_sub(before).min(seq as u64) as usize
    }

    /// Fills one window: inputs and targets, `seq` each. Where the data ends, inputs go on with the
    /// end-of-text token (0 if there is none) and targets with -1, which a loss ignores.
    ///
    /// `documents`, if wanted, becomes the number of end-of-text tokens before each input of this
    /// window: attention stays within equal numbers, and an end-of-text token belongs to the
    /// document that it ends. Allocates nothing.
    ///
    /// # Panics
    /// If a slice is not `seq` long, there is no such window, or document numbers are wanted where
    /// no token ends a document.
    pub fn window(
        &self,
        window: u64,
        seq: usize,
        inputs: &mut [i32],
        targets: &mut [i32],
        documents: Option<&mut [i32]>,
    ) {
        assert_eq!([inputs.len(), targets.len()], [seq; 2], "a window has {seq} tokens");
        let num_targets = self.num_targets(window, seq);
        assert!(num_targets > 0, "window {window} of {}", self.num_windows(seq));
        let start = self.range.start + window * seq as u64;
        // One token more than there are targets, which is an input as well if the window has room.
        let num_inputs = seq.min(num_targets + 1);
        self.store.copy(start, &mut inputs[..num_inputs]);
        inputs[num_inputs..].fill(self.store.end_of_text.unwrap_or(0));
        targets[..num_targets - 1].copy_from_slice(&inputs[1..num_targets]);
        let last = num_targets - 1..num_targets;
        self.store.copy(start + num_targets as u64, &mut targets[last]);
        targets[num_targets..].fill(-1);
        if let Some(documents) = documents {
            assert_eq!(documents.len(), seq, "a window has {seq} tokens");
            let end = self.store.end_of_text.expect("document numbers need an end-of-text token");
            let mut document = 0;
            for (number, &input) in documents.iter_mut().zip(&*inputs) {
                *number = document;
                document += i32::from(input == end);
            }
        }
    }

    /// Checks that there is something to learn for each rank. `what` names the data in the message:
    /// training or validation.
    ///
    /// # Errors
    /// If there is no window, or fewer than ranks.
    pub fn require_windows(
        &self,
        what: &'static str,
        seq: usize,
        ranks: usize,
    ) -> Result<(), Error> {
        let (tokens, windows) = (self.len_tokens(), self.num_windows(seq));
        if windows == 0 {
            Err(Error::NothingToPredict { what, tokens })
        } else if windows < ranks as u64 {
            Err(Error::FewerWindowsThanRanks { what, tokens, windows, seq, ranks })
        } else {
            Ok(())
        }
    }

    /// Checks that `other` has tokens of the same kind.
    ///
    /// # Errors
    /// If one is text and the other comes from `.bin` files.
    pub fn require_same_kind(&self, other: &Dataset) -> Result<(), Error> {
        let (a, b) = (&self.store, &other.store);
        let (text, tokens) = match (a.is_text, b.is_text) {
            (true, false) => (a, b),
            (false, true) => (b, a),
            _ => return Ok(()),
        };
        Err(Error::Mixed { text: text.example.clone(), tokens: tokens.example.clone() })
    }
}

/// Training and validation data of a run.
#[derive(Clone, Debug)]
pub struct Splits {
    /// What the model learns from.
    pub train: Dataset,
    /// What it is evaluated on, if the config names anything.
    pub validation: Option<Dataset>,
}
