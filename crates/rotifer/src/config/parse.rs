//! From text to a [`Config`], with a place for every error.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fmt, fs};

use serde::de::value::Error as NoValue;
use serde::de::{self, Deserialize, Deserializer, SeqAccess, Visitor};
use toml::de::{DeTable, ValueDeserializer};
use toml::{Table, Value};

use super::{
    Checkpoint, Config, Data, Error, Model, Optimizer, Place, Ranks, Sample, Schedule, Train,
};

impl Config {
    /// Reads the config at `path`, applies `overrides`, and checks the whole.
    ///
    /// An override is `section.key=value`; the value is TOML, or a string that needs no quotes
    /// because it is nothing else (`train.out=runs/a`). A later one wins.
    ///
    /// # Errors
    /// If the file cannot be read or is not TOML; if a key is unknown, missing or has a value that
    /// it cannot have; if the values contradict each other ([`validate`](Config::validate)).
    pub fn load(path: &Path, overrides: &[String]) -> Result<Config, Error> {
        let text = fs::read_to_string(path)
            .map_err(|source| Error::Read { path: path.to_owned(), source })?;
        Config::parse(&text, path, overrides)
    }

    /// As [`load`](Config::load), for the text of a config; `path` is what errors call it, and
    /// names the run.
    ///
    /// # Errors
    /// As [`load`](Config::load).
    pub fn parse(text: &str, path: &Path, overrides: &[String]) -> Result<Config, Error> {
        let mut source = Source::parse(text, path)?;
        for set in overrides {
            source.set(set)?;
        }
        let mut config = source.config()?;
        let name = path.file_stem().unwrap_or(path.as_os_str());
        config.name = name.to_string_lossy().into_owned();
        config.validate()?;
        Ok(config)
    }
}

/// Values, and where each stands, by `section` and `section.key`.
struct Source {
    path: PathBuf,
    table: Table,
    places: BTreeMap<String, Place>,
}

impl Source {
    fn parse(text: &str, path: &Path) -> Result<Source, Error> {
        let place = |offset: usize| {
            let before = &text.as_bytes()[..offset.min(text.len())];
            let line = 1 + before.iter().filter(|&&b| b == b'\n').count();
            Place::Line { path: path.to_owned(), line }
        };
        let syntax = |e: toml::de::Error| Error::Syntax {
            place: place(e.span().map_or(0, |span| span.start)),
            message: e.message().to_owned(),
        };
        let table = toml::from_str(text).map_err(syntax)?;
        // Once more for the places, which a plain table does not keep.
        let spanned = DeTable::parse(text).map_err(syntax)?;
        let mut places = BTreeMap::new();
        for (section, value) in spanned.get_ref() {
            let name = section.get_ref();
            places.insert(name.to_string(), place(section.span().start));
            for key in value.get_ref().as_table().into_iter().flat_map(|table| table.keys()) {
                places.insert(format!("{name}.{}", key.get_ref()), place(key.span().start));
            }
        }
        let source = Source { path: path.to_owned(), table, places };
        source.check_keys()?;
        Ok(source)
    }

    /// Checks the keys of the file.
    fn check_keys(&self) -> Result<(), Error> {
        for (section, value) in &self.table {
            check_key(section, None, &self.places[section])?;
            for key in value.as_table().into_iter().flat_map(Table::keys) {
                check_key(section, Some(key), &self.places[&format!("{section}.{key}")])?;
            }
        }
        Ok(())
    }

    /// Applies one override.
    fn set(&mut self, set: &str) -> Result<(), Error> {
        let malformed = || Error::Set { set: set.to_owned() };
        let (name, value) = set.split_once('=').ok_or_else(malformed)?;
        let (name, value) = (name.trim(), value.trim());
        let (section, key) = name.split_once('.').ok_or_else(malformed)?;
        let place = Place::Set { set: set.to_owned() };
        check_key(section, Some(key), &place)?;
        let value = ValueDeserializer::parse(value)
            .and_then(Value::deserialize)
            .unwrap_or_else(|_| Value::String(value.to_owned()));
        let section = self.table.entry(section).or_insert_with(|| Value::Table(Table::new()));
        // A section that is no table stays as it is: its own error follows.
        if let Value::Table(section) = section {
            section.insert(key.to_owned(), value);
            self.places.insert(name.to_owned(), place);
        }
        Ok(())
    }

    fn config(self) -> Result<Config, Error> {
        let Source { path, table, places } = self;
        serde_path_to_error::deserialize(Value::Table(table)).map_err(|e| {
            let at = e.path().to_string();
            let mut key = if at == "." { String::new() } else { at };
            let message = e.inner().message();
            if let Some(field) = message.strip_prefix("missing field `") {
                let dot = if key.is_empty() { "" } else { "." };
                key = format!("{key}{dot}{}", field.trim_end_matches('`'));
                return Error::MissingKey { place: Place::File { path }, key };
            }
            // An element of a list stands where its key stands.
            let known = key.split(['[']).next().and_then(|key| places.get(key));
            let place = known.cloned().unwrap_or(Place::File { path });
            Error::Value { place, key, message: plain(message) }
        })
    }
}

/// A message of serde in the words of someone who does not write Rust.
fn plain(message: &str) -> String {
    const WORDS: [(&str, &str); 7] = [
        ("expected a nonzero usize", "expected a whole number of 1 or more"),
        ("expected usize", "expected a whole number of 0 or more"),
        ("expected u64", "expected a whole number of 0 or more"),
        ("expected u32", "expected a whole number of 0 or more"),
        ("expected f64", "expected a number"),
        ("expected f32", "expected a number"),
        ("expected a boolean", "expected true or false"),
    ];
    WORDS.iter().fold(message.to_owned(), |m, (from, to)| m.replace(from, to))
}

/// The keys of one section.
fn keys_of(section: &str) -> &'static [&'static str] {
    match section {
        "model" => fields::<Model>(),
        "data" => fields::<Data>(),
        "train" => fields::<Train>(),
        "optimizer" => fields::<Optimizer>(),
        "schedule" => fields::<Schedule>(),
        "ranks" => fields::<Ranks>(),
        "checkpoint" => fields::<Checkpoint>(),
        "sample" => fields::<Sample>(),
        _ => &[],
    }
}

/// Checks that a section, or a key of it, exists.
fn check_key(section: &str, key: Option<&str>, place: &Place) -> Result<(), Error> {
    let sections = fields::<Config>();
    let is_section = sections.contains(&section);
    let (name, advice) = match key {
        None if is_section => return Ok(()),
        Some(key) if keys_of(section).contains(&key) => return Ok(()),
        Some(key) if is_section => (format!("{section}.{key}"), nearest_key(section, key)),
        _ => {
            let dotted = key.map(|key| format!(".{key}")).unwrap_or_default();
            let advice = match nearest(section, sections) {
                Some(near) => format!("did you mean {near}{dotted}?"),
                None => format!("the sections are {}", sections.join(", ")),
            };
            (format!("section {section}{dotted}"), advice)
        }
    };
    Err(Error::UnknownKey { place: place.clone(), key: name, advice })
}

/// What else an unknown key of a section may have been meant to be.
fn nearest_key(section: &str, key: &str) -> String {
    let keys = keys_of(section);
    // The right key in the wrong section counts more than one that looks a little like it.
    let elsewhere = fields::<Config>().iter().find(|other| keys_of(other).contains(&key));
    match (elsewhere, nearest(key, keys)) {
        (Some(other), _) => format!("did you mean {other}.{key}?"),
        (None, Some(near)) => format!("did you mean {section}.{near}?"),
        (None, None) => format!("[{section}] has {}", keys.join(", ")),
    }
}

/// The known name that is closest to `name`, unless none is close: one edit in three letters.
pub(crate) fn nearest(name: &str, known: &[&'static str]) -> Option<&'static str> {
    let edits = |k: &str| strsim::damerau_levenshtein(&name.to_lowercase(), k);
    let near = known.iter().copied().min_by_key(|k| edits(k))?;
    (edits(near) <= near.len().div_ceil(3)).then_some(near)
}

/// The names of the fields of `T`, from its derived `Deserialize`: a deserialiser that writes down
/// what it is asked for and gives nothing.
fn fields<'de, T: Deserialize<'de>>() -> &'static [&'static str] {
    struct Ask<'a>(&'a mut &'static [&'static str]);

    impl<'de> Deserializer<'de> for Ask<'_> {
        type Error = NoValue;

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, NoValue> {
            Err(de::Error::custom("only structs have fields"))
        }

        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            visitor: V,
        ) -> Result<V::Value, NoValue> {
            *self.0 = fields;
            self.deserialize_any(visitor)
        }

        serde::forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf
            option unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier
            ignored_any
        }
    }

    let mut names: &[&str] = &[];
    // It always fails, once it has told the names.
    let _ = T::deserialize(Ask(&mut names));
    names
}

/// A string or a list of strings.
pub(super) fn one_or_more<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    struct OneOrMore;

    impl<'de> Visitor<'de> for OneOrMore {
        type Value = Vec<String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a path or a list of paths")
        }

        fn visit_str<E: de::Error>(self, one: &str) -> Result<Vec<String>, E> {
            Ok(vec![one.to_owned()])
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<String>, A::Error> {
            let mut all = Vec::new();
            while let Some(one) = seq.next_element()? {
                all.push(one);
            }
            Ok(all)
        }
    }

    from.deserialize_any(OneOrMore)
}

/// A number of bytes: an integer, or a string such as "512KiB", "4MiB", "1.5GiB" or "10MB".
pub(super) fn bytes<'de, D: Deserializer<'de>>(from: D) -> Result<usize, D::Error> {
    struct Bytes;

    impl Visitor<'_> for Bytes {
        type Value = usize;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a number of bytes, such as 65536 or \"4MiB\" (KiB, MiB, GiB, kB, MB, GB)")
        }

        fn visit_u64<E: de::Error>(self, n: u64) -> Result<usize, E> {
            usize::try_from(n).map_err(|_| E::invalid_value(de::Unexpected::Unsigned(n), &self))
        }

        fn visit_i64<E: de::Error>(self, n: i64) -> Result<usize, E> {
            usize::try_from(n).map_err(|_| E::invalid_value(de::Unexpected::Signed(n), &self))
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<usize, E> {
            bytes_of(text).ok_or_else(|| E::invalid_value(de::Unexpected::Str(text), &self))
        }
    }

    from.deserialize_any(Bytes)
}

/// Bytes of "4MiB"; a fraction of a byte is cut off.
pub(crate) fn bytes_of(text: &str) -> Option<usize> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit.trim() {
        "" | "B" => 1.0,
        "kB" | "KB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        "KiB" => 1024.0,
        "MiB" => 1024.0 * 1024.0,
        "GiB" => 1024.0 * 1024.0 * 1024.0,
        _ => return None,
    };
    // Beyond 2^53 a double is no longer exact, nor are there such sizes.
    let bytes = number.parse::<f64>().ok()? * factor;
    (bytes < 9e15).then_some(bytes as usize)
}
