//! What can be known of a model without any of its memory.

use rotifer_device::{Arena, MemoryPlan};
use rotifer_ring::Comm;

use super::{TrainOptions, build};
use crate::error::Result;
use crate::models::Model;

/// Bytes that one rank will need, by purpose, without allocating any.
///
/// # Errors
/// If the model's shapes do not fit together or the batch is too small for the ranks.
pub fn plan(model: &mut dyn Model, comm: &Comm, options: &TrainOptions) -> Result<MemoryPlan> {
    options.check(comm.world())?;
    let mut arena = Arena::counting();
    build(model, &mut arena, comm, options, None)?;
    Ok(arena.plan())
}

/// Elements of all parameters of a model, each counted once, without allocating any.
///
/// # Errors
/// If the model's shapes do not fit together.
pub fn num_parameters(model: &mut dyn Model, options: &TrainOptions) -> Result<u64> {
    let comm = Comm::alone();
    options.check(comm.world())?;
    let parts = build(model, &mut Arena::counting(), &comm, options, None)?;
    Ok(parts.built.params.iter().map(|param| param.len() as u64).sum())
}
