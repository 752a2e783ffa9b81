//! The tokens of all files, in the memory that the files take and no more: a byte per byte of text,
//! two per token of a `.bin`.

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::files::{self, Found};
use super::{ByteTokenizer, Error, Options};

/// Stands for the end of a text among bytes; no byte of UTF-8 has this value.
const END: u8 = 0xff;

/// Texts of fewer bytes are copied into one buffer: a mapping takes whole pages, and a process can
/// have only so many of them (65,530 on Linux).
const MAP_BYTES_MIN: usize = 1 << 20;

/// A run of tokens.
enum Data {
    /// One document, which the end of a text follows.
    Text(Mmap),
    /// Documents in memory, each closed by [`END`].
    Joined(Vec<u8>),
    /// Little-endian 2-byte tokens.
    Tokens(Mmap),
}

impl Data {
    fn len(&self) -> usize {
        match self {
            Data::Text(bytes) => bytes.len() + 1,
            Data::Joined(bytes) => bytes.len(),
            Data::Tokens(bytes) => bytes.len() / 2,
        }
    }

    /// Tokens `from ..` of this run.
    fn copy(&self, from: usize, out: &mut [i32]) {
        let token = |byte: u8| match byte {
            END => ByteTokenizer::END_OF_TEXT,
            byte => i32::from(byte),
        };
        let widen = |bytes: &[u8], out: &mut [i32]| {
            out.iter_mut().zip(bytes).for_each(|(o, &b)| *o = token(b));
        };
        match self {
            Data::Text(bytes) => {
                let inside = out.len().min(bytes.len() - from);
                let (text, end) = out.split_at_mut(inside);
                widen(&bytes[from..], text);
                end.fill(ByteTokenizer::END_OF_TEXT);
            }
            Data::Joined(bytes) => widen(&bytes[from..], out),
            Data::Tokens(bytes) => {
                let (pairs, _) = bytes[2 * from..].as_chunks();
                out.iter_mut().zip(pairs).for_each(|(o, &p)| *o = u16::from_le_bytes(p).into());
            }
        }
    }
}

/// All tokens of some entries, one file behind the other.
pub(super) struct Store {
    runs: Vec<Data>,
    /// Number of tokens up to and with each run.
    ends: Vec<u64>,
    pub end_of_text: Option<i32>,
    /// A file that shows which tokens these are.
    pub example: PathBuf,
    pub is_text: bool,
}

impl Store {
    pub fn open(entries: &[String], options: &Options) -> Result<Store, Error> {
        let mut reader = Reader { options, runs: Vec::new(), text: None, tokens: None };
        for entry in entries {
            for found in files::find(entry)? {
                reader.read(found)?;
            }
        }
        let Reader { runs, text, tokens, .. } = reader;
        let (example, is_text) = match (text, tokens) {
            (Some(text), Some(tokens)) => return Err(Error::Mixed { text, tokens }),
            (Some(text), None) => (text, true),
            (None, Some(tokens)) => (tokens, false),
            (None, None) => return Err(Error::NoTokens { entries: entries.join(", ") }),
        };
        let end_of_text = end_of_text(options, is_text)?;
        let ends = runs.iter().scan(0, |end, run| {
            *end += run.len() as u64;
            Some(*end)
        });
        Ok(Store { ends: ends.collect(), runs, end_of_text, example, is_text })
    }

    /// Number of tokens.
    pub fn len(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Tokens `from ..`, all of which must exist.
    pub fn copy(&self, from: u64, mut out: &mut [i32]) {
        let mut run = self.ends.partition_point(|&end| end <= from);
        let start = if run == 0 { 0 } else { self.ends[run - 1] };
        // Within a run, and a run fits into memory.
        let mut offset = (from - start) as usize;
        while !out.is_empty() {
            let data = &self.runs[run];
            let (head, tail) = out.split_at_mut(out.len().min(data.len() - offset));
            data.copy(offset, head);
            out = tail;
            offset = 0;
            run += 1;
        }
    }
}

/// The token that ends a text, if there is one.
fn end_of_text(options: &Options, is_text: bool) -> Result<Option<i32>, Error> {
    let vocab_size = options.vocab_size.unwrap_or(ByteTokenizer::VOCAB_SIZE);
    if is_text {
        if vocab_size < ByteTokenizer::VOCAB_SIZE {
            return Err(Error::VocabTooSmall { vocab_size, tokenizer: ByteTokenizer::VOCAB_SIZE });
        }
        return match options.end_of_text {
            Some(id) if id as i32 != ByteTokenizer::END_OF_TEXT => {
                let allowed = "text data ends documents by itself, with token 256: leave it out";
                Err(Error::EndOfText { id, allowed })
            }
            _ => Ok(Some(ByteTokenizer::END_OF_TEXT)),
        };
    }
    match options.end_of_text {
        Some(id) if id as usize >= vocab_size => {
            Err(Error::EndOfText { id, allowed: "it must be smaller than model.vocab_size" })
        }
        Some(id) => Ok(Some(id as i32)),
        None => Ok(None),
    }
}

/// Files on their way into a store.
struct Reader<'o> {
    options: &'o Options,
    runs: Vec<Data>,
    /// A file of either kind, if there was one.
    text: Option<PathBuf>,
    tokens: Option<PathBuf>,
}

impl Reader<'_> {
    fn read(&mut self, Found { path, named }: Found) -> Result<(), Error> {
        let Some(bytes) = map(&path)? else {
            return if named { Err(Error::Empty { path }) } else { Ok(()) };
        };
        match path.extension().and_then(|e| e.to_str()) {
            Some("bin") => {
                self.check_tokens(&bytes, &path)?;
                self.runs.push(Data::Tokens(bytes));
                self.tokens = Some(path);
            }
            Some("jsonl") => {
                self.read_jsonl(&bytes, &path)?;
                self.text = Some(path);
            }
            _ => {
                if let Err(e) = std::str::from_utf8(&bytes) {
                    return Err(Error::NotUtf8 { path, offset: e.valid_up_to() });
                }
                if bytes.len() < MAP_BYTES_MIN {
                    self.join(&bytes);
                } else {
                    self.runs.push(Data::Text(bytes));
                }
                self.text = Some(path);
            }
        }
        Ok(())
    }

    /// Adds a copy of one document to the buffer of such copies.
    fn join(&mut self, document: &[u8]) {
        if !matches!(self.runs.last(), Some(Data::Joined(_))) {
            self.runs.push(Data::Joined(Vec::new()));
        }
        if let Some(Data::Joined(bytes)) = self.runs.last_mut() {
            bytes.extend_from_slice(document);
            bytes.push(END);
        }
    }

    /// Adds the text of every line. Blank lines and empty texts are no documents.
    fn read_jsonl(&mut self, bytes: &[u8], path: &Path) -> Result<(), Error> {
        let field = &self.options.text_field;
        for (i, line) in bytes.split(|&b| b == b'\n').enumerate() {
            if line.trim_ascii().is_empty() {
                continue;
            }
            let (path, line_number) = (path.to_owned(), i + 1);
            let object: serde_json::Map<String, serde_json::Value> =
                match serde_json::from_slice(line) {
                    Ok(object) => object,
                    Err(source) => return Err(Error::Json { path, line: line_number, source }),
                };
            match object.get(field).and_then(|text| text.as_str()) {
                Some("") => {}
                Some(text) => self.join(text.as_bytes()),
                None => {
                    let found = object.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
                    let field = field.clone();
                    return Err(Error::NoText { path, line: line_number, field, found });
                }
            }
        }
        Ok(())
    }

    /// Reads the whole file once, at the speed of memory: a token that is too large must not end a
    /// run after hours.
    fn check_tokens(&self, bytes: &[u8], path: &Path) -> Result<(), Error> {
        let path = || path.to_owned();
        let Some(vocab_size) = self.options.vocab_size else {
            return Err(Error::NoVocabSize { path: path() });
        };
        let (pairs, odd) = bytes.as_chunks();
        if !odd.is_empty() {
            return Err(Error::OddBytes { path: path(), bytes: bytes.len() as u64 });
        }
        let too_large = |pair: &[u8; 2]| usize::from(u16::from_le_bytes(*pair)) >= vocab_size;
        // Whole blocks first: without an early exit the comparison runs in SIMD.
        for (block, tokens) in pairs.chunks(4096).enumerate() {
            if tokens.iter().fold(false, |any, pair| any | too_large(pair))
                && let Some(i) = tokens.iter().position(too_large)
            {
                let (position, id) = ((block * 4096 + i) as u64, u16::from_le_bytes(tokens[i]));
                return Err(Error::TokenTooLarge { path: path(), position, id, vocab_size });
            }
        }
        Ok(())
    }
}

/// The bytes of a file, or none if it is empty.
fn map(path: &Path) -> Result<Option<Mmap>, Error> {
    let broken = |source| Error::Io { path: path.to_owned(), source };
    let file = File::open(path).map_err(broken)?;
    if file.metadata().map_err(broken)?.len() == 0 {
        return Ok(None);
    }
    // SAFETY: the bytes are only ever read as integers, each of which is valid whatever its value;
    // that they are UTF-8 or small enough is checked once but relied on by no unsafe code. So a
    // file that another process rewrites meanwhile yields other tokens, and one that it cuts short
    // ends this process by SIGBUS; the public documentation asks for files that stay as they are.
    unsafe { Mmap::map(&file) }.map(Some).map_err(broken)
}
