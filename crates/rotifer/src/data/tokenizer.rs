//! Bytes as tokens.

/// The byte tokenizer: token i is byte i of UTF-8 text, and one more token ends a document.
///
/// Nothing has to be trained or shipped, every text has tokens, and the table is small; in return a
/// text has about four times the tokens that a byte-pair vocabulary would give it.
///
/// ```
/// use rotifer::data::ByteTokenizer;
/// assert_eq!(ByteTokenizer::encode("hé"), [104, 195, 169]);
/// assert_eq!(ByteTokenizer::decode(&[104, 195, 169, 256]), "hé");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteTokenizer;

impl ByteTokenizer {
    /// Number of tokens: 256 bytes and the end of a text.
    pub const VOCAB_SIZE: usize = 257;
    /// The token that follows every document.
    pub const END_OF_TEXT: i32 = 256;

    /// The tokens of `text`, without an end.
    #[must_use]
    pub fn encode(text: &str) -> Vec<i32> {
        text.bytes().map(i32::from).collect()
    }

    /// The text of `tokens`; what is no UTF-8 becomes U+FFFD, as [`StreamDecoder`] does.
    #[must_use]
    pub fn decode(tokens: &[i32]) -> String {
        let mut text = String::with_capacity(tokens.len());
        let mut decoder = StreamDecoder::default();
        for &token in tokens {
            decoder.push(token, &mut text);
        }
        decoder.finish(&mut text);
        text
    }
}

/// Decodes tokens as they are sampled: a character appears when its last byte is there.
///
/// A model may sample anything. Bytes that are no UTF-8 become U+FFFD exactly as
/// [`String::from_utf8_lossy`] replaces them; so does a token that the tokenizer does not know (a
/// model's table may be larger). The end of a text adds nothing.
///
/// ```
/// use rotifer::data::StreamDecoder;
/// let (mut decoder, mut text) = (StreamDecoder::default(), String::new());
/// decoder.push(0xc3, &mut text);
/// assert_eq!(text, "");
/// decoder.push(0xa9, &mut text);
/// assert_eq!(text, "é");
/// ```
#[derive(Clone, Debug, Default)]
pub struct StreamDecoder {
    /// A character's first bytes: 3 at most between two calls.
    pending: Vec<u8>,
}

impl StreamDecoder {
    /// Appends to `text` what `token` completes.
    pub fn push(&mut self, token: i32, text: &mut String) {
        match u8::try_from(token) {
            Ok(byte) => {
                self.pending.push(byte);
                self.drain(text);
            }
            Err(_) => {
                self.finish(text);
                if token != ByteTokenizer::END_OF_TEXT {
                    text.push(char::REPLACEMENT_CHARACTER);
                }
            }
        }
    }

    /// Ends the text: a character that is still incomplete becomes U+FFFD.
    pub fn finish(&mut self, text: &mut String) {
        if !self.pending.is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
            self.pending.clear();
        }
    }

    /// Moves every complete or impossible sequence from `pending` to `text`.
    fn drain(&mut self, text: &mut String) {
        while let Some(chunk) = self.pending.utf8_chunks().next() {
            let (valid, invalid) = (chunk.valid(), chunk.invalid());
            let (kept, used) = (valid.len(), valid.len() + invalid.len());
            text.push_str(valid);
            if !invalid.is_empty() {
                let rest = std::str::from_utf8(invalid).expect_err("a chunk's end is no UTF-8");
                if rest.error_len().is_none() && used == self.pending.len() {
                    self.pending.drain(..kept);
                    return;
                }
                text.push(char::REPLACEMENT_CHARACTER);
            }
            self.pending.drain(..used);
        }
    }
}
