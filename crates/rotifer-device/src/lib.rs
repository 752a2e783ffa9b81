//! Memory and maths on one device.
//!
//! This crate knows bytes and shapes; it does not know ranks, layers or files.
//!
//! - [`Arena`] decides all memory before the first step: a model's constructor runs once on an
//!   arena that only counts, then on one of exactly that many bytes.
//! - [`Region`] is a small handle to a part of an arena; kernels take regions, never slices.
//! - [`Device`] is the list of kernels a trainer needs. [`CpuDevice`] is the fast one;
//!   [`reference`](mod@reference) holds the naive `f64` twin of each kernel, the oracle of its
//!   tests. [`MetaDevice`] has no data, only a [`Clock`]: what a step would cost.

mod arena;
mod clock;
mod cpu;
mod device;
mod memory;
mod meta;
mod region;

pub mod reference;

pub use arena::{Arena, MemoryPlan, Scope};
pub use clock::{Clock, KernelSpan};
pub use cpu::{CpuDevice, ThreadsError};
pub use device::{
    Activation, AdamW, Attention, Device, KernelKind, Mat, Norm, Profile, Rotary, Sgd, Stream,
    Write,
};
pub use memory::{Memory, OutOfMemory};
pub use meta::{MatmulForm, MatmulRates, MatmulTable, MetaDevice, Rates};
pub use region::{Dtype, Lent, Purpose, Region};
