//! Rotated tensor parallelism: training across N ranks that each hold 1/N of everything.
//!
//! Weight shards travel round a ring; every rank computes its own slice of the batch with each
//! shard that comes by. So no rank ever holds a whole layer, a whole gradient or a whole batch, and
//! nothing need divide by N. "Rethinking Tensor Parallelism with Memory Deduplication", arXiv
//! 2311.01635.
//!
//! Read [`strategy::rotated`] first, then [`Sharded`], the maths of one shard that every layer with
//! weights is written as, then [`layers::Linear`]. [`train::Trainer`] is the step of one rank;
//! [`session`] is a whole run, as the command line does it. A model is structure only, see
//! [`models::gpt2`] and `examples/custom_model.rs`: memory, rotation and backward follow from it.

pub mod bench;
pub mod build;
pub mod checkpoint;
pub mod config;
pub mod data;
mod error;
pub mod generate;
mod hash;
mod layer;
pub mod layers;
pub mod models;
pub mod optim;
pub mod params;
pub mod session;
mod setup;
mod sharded;
pub mod strategy;
pub mod train;

pub use error::{Error, Result};
pub use layer::{Batch, Context, Layer, Phase, Slices};
pub use sharded::{Seen, Sharded, Share, Span, Visit};
