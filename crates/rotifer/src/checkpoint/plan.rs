//! Which tensor lies where in which file: a function of names and shapes, so that every rank
//! knows it without a word.

use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde_json::json;

use crate::params::{Param, Piece};
use rotifer_device::Region;

/// What of a parameter a tensor of a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    Weights,
    /// The optimiser state of this number.
    State(usize),
}

impl Content {
    /// Its part in one piece.
    pub fn region(self, piece: &Piece) -> Region {
        match self {
            Content::Weights => piece.weights,
            Content::State(number) => piece.states[number],
        }
    }
}

/// A tensor of a file.
pub(super) struct Stored<'a> {
    pub name: String,
    pub param: &'a Param,
    pub content: Content,
}

impl Stored<'_> {
    pub fn bytes(&self) -> u64 {
        (self.param.len() * size_of::<f32>()) as u64
    }
}

/// The weights of all parameters, under their own names.
pub(super) fn weights(params: &[Param]) -> Vec<Stored<'_>> {
    let mut stored = Vec::with_capacity(params.len());
    for param in params {
        stored.push(Stored { name: param.name.clone(), param, content: Content::Weights });
    }
    stored
}

/// The optimiser states of all parameters: `exp_avg/NAME`, in the shape of the weights.
pub(super) fn states<'a>(params: &'a [Param], kinds: &[&str]) -> Vec<Stored<'a>> {
    let of = |param: &'a Param| {
        kinds.iter().enumerate().map(move |(number, kind)| Stored {
            name: format!("{kind}/{}", param.name),
            param,
            content: Content::State(number),
        })
    };
    params.iter().flat_map(of).collect()
}

/// A file to be written.
pub(super) struct FilePlan {
    pub name: String,
    /// Length and JSON of the header.
    pub header: Vec<u8>,
    /// Size of the file.
    pub bytes: u64,
}

/// Where tensors go.
pub(super) struct Plan {
    pub files: Vec<FilePlan>,
    /// Per tensor: number of its file, and its first byte there.
    pub places: Vec<(usize, u64)>,
    /// Name and content of the list of which tensor is where, if there are several files.
    pub index: Option<(String, Vec<u8>)>,
}

impl Plan {
    /// Places `tensors` one behind the other in `STEM.safetensors`, or, if that would exceed
    /// `file_bytes_max`, in `STEM-00001-of-00003.safetensors` and so on with an index. A tensor
    /// is never divided: one that is larger has a file of its own.
    pub fn new(stem: &str, tensors: &[Stored<'_>], file_bytes_max: u64) -> Plan {
        // Where files end, as numbers of tensors.
        let mut ends = Vec::new();
        let mut bytes = 0;
        for (i, tensor) in tensors.iter().enumerate() {
            if bytes > 0 && bytes + tensor.bytes() > file_bytes_max {
                ends.push(i);
                bytes = 0;
            }
            bytes += tensor.bytes();
        }
        ends.push(tensors.len());
        let count = ends.len();
        let mut places = Vec::with_capacity(tensors.len());
        let mut files = Vec::with_capacity(count);
        let mut begin = 0;
        for (number, end) in ends.into_iter().enumerate() {
            let name = match count {
                1 => format!("{stem}.safetensors"),
                _ => format!("{stem}-{:05}-of-{count:05}.safetensors", number + 1),
            };
            files.push(file(name, &tensors[begin..end], number, &mut places));
            begin = end;
        }
        let index = (count > 1).then(|| {
            let total: u64 = tensors.iter().map(Stored::bytes).sum();
            let map: serde_json::Map<_, _> = tensors
                .iter()
                .zip(&places)
                .map(|(tensor, (file, _))| (tensor.name.clone(), files[*file].name.clone().into()))
                .collect();
            let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
            (format!("{stem}{INDEX_SUFFIX}"), format!("{index:#}\n").into_bytes())
        });
        Plan { files, places, index }
    }
}

/// What follows the stem in the name of an index.
pub(super) const INDEX_SUFFIX: &str = ".safetensors.index.json";

/// Plans one file and appends the places of its tensors.
fn file(
    name: String,
    tensors: &[Stored<'_>],
    number: usize,
    places: &mut Vec<(usize, u64)>,
) -> FilePlan {
    let mut at = 0;
    let mut infos = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let data_offsets = (at, at + tensor.param.len() * size_of::<f32>());
        let info = TensorInfo { dtype: Dtype::F32, shape: tensor.param.shape(), data_offsets };
        infos.push((tensor.name.clone(), info));
        at = data_offsets.1;
    }
    let starts: Vec<u64> = infos.iter().map(|(_, info)| info.data_offsets.0 as u64).collect();
    // `transformers` refuses a file that does not say who may read it.
    let format = [("format".to_owned(), "pt".to_owned())].into_iter().collect();
    let metadata = Metadata::new(Some(format), infos).expect("tensors lie one behind the other");
    let mut json = serde_json::to_vec(&metadata).expect("metadata is always JSON");
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    let data = header.len() as u64;
    places.extend(starts.into_iter().map(|start| (number, data + start)));
    FilePlan { name, bytes: data + at as u64, header }
}
