//! Rotated tensor parallelism (rtp): every shard of a unit comes by, and this rank computes its own
//! slice of the batch with each. The order of shards and hops is [`rotifer_ring::schedule`]'s, the
//! hops are [`rotifer_ring::Ring`]'s, the maths is the layer's; this file only joins the three.
//!
//! Source: "Rethinking Tensor Parallelism with Memory Deduplication", arXiv 2311.01635, section 3.

use rotifer_device::{Device, Region};
use rotifer_ring::Ring;

use crate::build::Unit;
use crate::error::Result;
use crate::sharded::Span;

/// `visit(which rows, weights)` for every shard of the unit.
///
/// # Errors
/// If a neighbour in the ring fails.
pub fn forward(
    ring: &Ring,
    dev: &dyn Device,
    unit: &Unit,
    mut visit: impl FnMut(Span, Region),
) -> Result<()> {
    for shards in unit.shards() {
        let span = |k| Span::of(shards.cut.shard(shards.group, k));
        ring.forward(dev, &shards, |k, w| visit(span(k), w))?;
    }
    Ok(())
}

/// `data(which rows, weights)`, then `add(which rows, weights, gradient)` for every shard, whose
/// gradient travels with it.
///
/// # Errors
/// If a neighbour in the ring fails.
pub fn backward(
    ring: &Ring,
    dev: &dyn Device,
    unit: &Unit,
    mut data: impl FnMut(Span, Region),
    mut add: impl FnMut(Span, Region, Region),
) -> Result<()> {
    for shards in unit.shards() {
        let span = |k| Span::of(shards.cut.shard(shards.group, k));
        ring.backward(dev, &shards, |k, w| data(span(k), w), |k, w, dw| add(span(k), w, dw))?;
    }
    Ok(())
}
