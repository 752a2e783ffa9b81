//! Parameters as the optimiser, checkpoints and initialisation see them: global tensors, of which a
//! rank holds pieces.

use std::ops::Range;

use rotifer_device::{Device, Region, Stream};

use crate::hash::mix;

/// Initial value of a tensor. Each element is a function of the seed, the tensor's name and the
/// element's place in the whole tensor, so a rank fills its pieces without drawing the rest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All zeros.
    Zeros,
    /// All ones.
    Ones,
    /// Normal with mean 0.
    Normal {
        /// Standard deviation.
        std: f32,
    },
}

/// How a tensor lies in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `[rows, width]`, as PyTorch's `nn.Linear` and `nn.Embedding`.
    Rows,
    /// `[width, rows]`, as GPT-2's `Conv1D`.
    Transposed,
    /// `[rows]`, for width 1.
    Vector,
}

/// One global tensor of `rows x width` elements.
#[derive(Clone, Debug)]
pub struct Param {
    /// Its name in checkpoints.
    pub name: String,
    /// Rows of the whole tensor: the dimension that is cut.
    pub rows: usize,
    /// Elements per row.
    pub width: usize,
    /// How it lies in files.
    pub layout: Layout,
    /// Initial value.
    pub init: Init,
    /// Whether weight decay applies.
    pub decay: bool,
    /// Whether every rank has the whole tensor.
    pub replicated: bool,
    /// What this rank holds.
    pub pieces: Vec<Piece>,
}

/// Some rows of a tensor, with their gradients and optimiser state (empty where not trained).
#[derive(Clone, Debug)]
pub struct Piece {
    /// Which rows of the whole.
    pub rows: Range<usize>,
    /// Their values, row-major.
    pub weights: Region,
    /// Their gradients.
    pub gradients: Region,
    /// Their optimiser state.
    pub states: Vec<Region>,
}

impl Param {
    /// Elements of the whole tensor.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.rows * self.width
    }

    /// Whether the tensor has no elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Shape in files.
    #[must_use]
    pub fn shape(&self) -> Vec<usize> {
        match self.layout {
            Layout::Rows => vec![self.rows, self.width],
            Layout::Transposed => vec![self.width, self.rows],
            Layout::Vector => vec![self.rows],
        }
    }

    /// Fills this rank's pieces with the initial value.
    pub fn initialise(&self, dev: &dyn Device, seed: u64) {
        for piece in &self.pieces {
            match self.init {
                Init::Zeros => dev.fill(piece.weights, 0.0),
                Init::Ones => dev.fill(piece.weights, 1.0),
                Init::Normal { std } => {
                    let stream = Stream { seed, stream: stream_of(&self.name) };
                    let first = (piece.rows.start * self.width) as u64;
                    dev.normal(stream, first, 0.0, std, piece.weights);
                }
            }
        }
    }
}

/// FNV-1a of the name, spread over all bits: a tensor keeps its numbers wherever it is built.
fn stream_of(name: &str) -> u64 {
    let fnv = |h: u64, b: u8| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3);
    mix(name.bytes().fold(0xcbf2_9ce4_8422_2325, fnv))
}
