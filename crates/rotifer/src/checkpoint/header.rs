//! What a safetensors file says it holds, believed only as far as the file goes.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use safetensors::tensor::Dtype;
use serde::Deserialize;
use serde::de::{self, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::disk::io_error;
use crate::error::{Error, Result};

/// Longest header that is believed. A thousand tensors take 150 kB.
const HEADER_BYTES_MAX: u64 = 16 << 20;

/// Most dimensions of a tensor.
const DIMS_MAX: usize = 8;

/// Key of what is not about a tensor.
const METADATA: &str = "__metadata__";

/// Where a tensor is in its file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entry {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Its first byte, from the start of the file.
    pub start: u64,
}

/// Every tensor of a file, by name. `file` is read from its start.
///
/// # Errors
/// If the file is no safetensors file: the header is too long, is no JSON, names a tensor twice or
/// has tensors that overlap, leave holes, or reach beyond the file's end.
pub(super) fn read(file: &File, path: &Path) -> Result<BTreeMap<String, Entry>> {
    let bad = |what: String| Error::Checkpoint { path: path.into(), what };
    let size = file.metadata().map_err(io_error("read", path))?.len();
    let mut from = file;
    let mut length = [0; 8];
    from.read_exact(&mut length).map_err(|_| bad("has no header".into()))?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_BYTES_MAX || length + 8 > size {
        return Err(bad(format!(
            "a header of {length} bytes does not fit a file of {size} (and {HEADER_BYTES_MAX} is \
             the most)"
        )));
    }
    // Parsed as it is read: no rank holds the text as well.
    let text = BufReader::with_capacity(1 << 14, from.take(length));
    let Tensors(named) = serde_json::from_reader(text)
        .map_err(|e| bad(format!("its header is no safetensors header: {e}")))?;
    let mut in_order: Vec<(&String, &Info)> = named.iter().collect();
    in_order.sort_by_key(|(_, info)| info.data_offsets);
    let mut end = 0;
    for (name, info) in in_order {
        let (start, stop) = info.data_offsets;
        let elements = info.shape.0.iter().try_fold(1u64, |n, d| n.checked_mul(*d as u64));
        let bits = elements.and_then(|n| n.checked_mul(info.dtype.bitsize() as u64));
        if bits.is_none() || bits != stop.checked_sub(start).and_then(|n| n.checked_mul(8)) {
            let name = shortened(name);
            let Info { dtype, shape: Shape(shape), .. } = info;
            let what = format!(
                "tensor {name} is {dtype:?} {shape:?}, but has the bytes {start} to {stop}"
            );
            return Err(bad(what));
        }
        if start != end {
            let what = if start < end { "overlaps another" } else { "leaves a hole before it" };
            return Err(bad(format!("tensor {} {what}", shortened(name))));
        }
        end = stop;
        if end > size - 8 - length {
            return Err(bad(format!("tensor {} does not fit the file", shortened(name))));
        }
    }
    if end != size - 8 - length {
        let extra = size - 8 - length - end;
        return Err(bad(format!("has {extra} bytes behind its last tensor")));
    }
    let entry = |(name, Info { dtype, shape, data_offsets })| {
        (name, Entry { dtype, shape: shape.0, start: 8 + length + data_offsets.0 })
    };
    Ok(named.into_iter().map(entry).collect())
}

/// A name from a file, short enough for a message.
pub(super) fn shortened(name: &str) -> String {
    const MOST: usize = 120;
    let mut text: String = name.chars().take(MOST).flat_map(char::escape_debug).collect();
    if name.chars().nth(MOST).is_some() {
        text.push_str("..");
    }
    text
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Info {
    dtype: Dtype,
    shape: Shape,
    data_offsets: (u64, u64),
}

/// Dimensions, few enough that a hostile list takes no memory.
struct Shape(Vec<usize>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Shape, D::Error> {
        struct Dims;

        impl<'de> Visitor<'de> for Dims {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {DIMS_MAX} dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut dims = Vec::new();
                while let Some(dim) = seq.next_element()? {
                    if dims.len() == DIMS_MAX {
                        return Err(de::Error::invalid_length(DIMS_MAX + 1, &self));
                    }
                    dims.push(dim);
                }
                Ok(Shape(dims))
            }
        }

        from.deserialize_seq(Dims)
    }
}

/// A header's tensors, each named once.
struct Tensors(BTreeMap<String, Info>);

impl<'de> Deserialize<'de> for Tensors {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Tensors, D::Error> {
        struct Header;

        impl<'de> Visitor<'de> for Header {
            type Value = Tensors;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object that says dtype, shape and data_offsets of each tensor")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Tensors, A::Error> {
                let mut found = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    let about = |e| de::Error::custom(format!("tensor {}: {e}", shortened(&name)));
                    let info: Info = map.next_value().map_err(about)?;
                    if found.contains_key(&name) {
                        let what = format!("tensor {} is there twice", shortened(&name));
                        return Err(de::Error::custom(what));
                    }
                    found.insert(name, info);
                }
                Ok(Tensors(found))
            }
        }

        from.deserialize_map(Header)
    }
}
