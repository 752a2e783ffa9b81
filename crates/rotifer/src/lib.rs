//! Rotated tensor parallelism.

pub mod build;
pub mod checkpoint;
pub mod config;
pub mod data;
mod error;
pub mod generate;
mod layer;
pub mod layers;
pub mod models;
pub mod optim;
pub mod optimizer;
pub mod params;
pub mod session;
mod setup;
mod sharded;
pub mod strategy;
pub mod train;

pub use error::{Error, Result};
pub use layer::{Batch, Context, Layer, Phase, Slices};
pub use sharded::{Sharded, Visit};
