//! What can be wrong with data.

use std::path::PathBuf;

/// Data that is missing, damaged or too little.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A path that leads nowhere.
    #[error(
        "there is no {}; paths start in the folder that the command is run in",
        path.display()
    )]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// A file or folder that cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A glob that is none.
    #[error("{pattern} is not a glob: {source}")]
    Pattern {
        /// The glob.
        pattern: String,
        /// Where it goes wrong.
        source: glob::PatternError,
    },
    /// A glob or folder without any file.
    #[error("{entry} matches no file")]
    NoMatch {
        /// The entry, as the config has it.
        entry: String,
    },
    /// A file, named by the user, without anything in it.
    #[error("{} is empty", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// Files that are all empty.
    #[error("there is not one token in {entries}")]
    NoTokens {
        /// The entries, as the config has them.
        entries: String,
    },
    /// A text file with bytes that are no text.
    #[error(
        "{} is not UTF-8 text: byte {offset} starts no character. Convert the file or leave it \
         out: a glob such as folder/**/*.txt, in the place of a folder, takes what it matches only",
        path.display()
    )]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// Offset of the first such byte, from 0.
        offset: usize,
    },
    /// A line of a JSON Lines file that is no JSON object.
    #[error("{} line {line} is not a JSON object: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// What is wrong; its own line number counts within the line.
        source: serde_json::Error,
    },
    /// A line of a JSON Lines file without text.
    #[error(
        "{} line {line} has no text in field {field:?}, but the fields {found}: set \
         data.text_field",
        path.display()
    )]
    NoText {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// The field that should hold a string.
        field: String,
        /// The fields that there are.
        found: String,
    },
    /// A file of 2-byte tokens with an odd number of bytes.
    #[error(
        "{} has {bytes} bytes, but its tokens have 2 each: it is cut short or holds something else",
        path.display()
    )]
    OddBytes {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
    },
    /// A token that the model does not know.
    #[error(
        "{} has token {id} at position {position}, but model.vocab_size is {vocab_size}: it must \
         be larger than every token",
        path.display()
    )]
    TokenTooLarge {
        /// The file.
        path: PathBuf,
        /// Number of the token in the file, from 0.
        position: u64,
        /// The token.
        id: u16,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// Tokens of an unknown vocabulary.
    #[error(
        "{} holds tokens but not the size of their vocabulary: set model.vocab_size (50257 for the \
         tokenizer of GPT-2)",
        path.display()
    )]
    NoVocabSize {
        /// The file.
        path: PathBuf,
    },
    /// A vocabulary that is too small for the tokenizer.
    #[error(
        "model.vocab_size is {vocab_size}, but the tokenizer of text data has {tokenizer} tokens: \
         raise it or leave it out"
    )]
    VocabTooSmall {
        /// Size of the model's vocabulary.
        vocab_size: usize,
        /// Size of the tokenizer's.
        tokenizer: usize,
    },
    /// An end-of-text token outside of the vocabulary, or for text that has its own.
    #[error("data.end_of_text is {id}: {allowed}")]
    EndOfText {
        /// The token.
        id: u32,
        /// What it may be.
        allowed: &'static str,
    },
    /// A document mask without a token that ends documents.
    #[error(
        "data.document_mask needs the token that ends a document: set data.end_of_text for .bin \
         data"
    )]
    NoEndOfText,
    /// Text and tokens together.
    #[error(
        "{} is text and {} holds tokens of another tokenizer: a model can learn only one of them",
        text.display(),
        tokens.display()
    )]
    Mixed {
        /// A text file.
        text: PathBuf,
        /// A file of tokens.
        tokens: PathBuf,
    },
    /// Too few tokens for a single target.
    #[error("{what} data of {tokens} tokens has nothing to predict: it takes 2 tokens at least")]
    NothingToPredict {
        /// Training or validation.
        what: &'static str,
        /// Number of tokens.
        tokens: u64,
    },
    /// Fewer sequences than ranks.
    #[error(
        "{what} data of {tokens} tokens makes {windows} sequences of {seq}, fewer than the {ranks} \
         ranks: shorten data.seq, add data or lower ranks.count"
    )]
    FewerWindowsThanRanks {
        /// Training or validation.
        what: &'static str,
        /// Number of tokens.
        tokens: u64,
        /// Number of sequences.
        windows: u64,
        /// Tokens per sequence.
        seq: usize,
        /// Number of ranks.
        ranks: usize,
    },
}
