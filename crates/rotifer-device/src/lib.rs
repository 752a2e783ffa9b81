//! Memory and maths on one device.
//!
//! This crate knows bytes and shapes; it does not know ranks, layers or files.
//!
//! - [`Arena`] decides all memory before the first step: a model's constructor runs once on an
//!   arena that only counts, then on one of exactly that many bytes.
//! - [`Region`] is a small handle to a part of an arena; kernels take regions, never slices.
//! - [`Device`] is the list of kernels a trainer needs. [`CpuDevice`] is the fast one;
//!   [`reference`](mod@reference) holds the naive `f64` twin of each kernel, the oracle of its
//!   tests.

mod arena;
mod cpu;
mod device;
mod memory;
mod region;

pub mod reference;

pub use arena::{Arena, MemoryPlan, Scope};
pub use cpu::{CpuDevice, ThreadsError};
pub use device::{
    Activation, AdamW, Attention, Device, KernelKind, Mat, Norm, Profile, Rotary, Sgd, Stream,
    Write,
};
pub use memory::{Memory, OutOfMemory};
pub use region::{Dtype, Lent, Purpose, Region};
