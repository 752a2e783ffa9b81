//! Rotated tensor parallelism (rtp): every shard of a unit comes by, and this rank computes its own
//! slice of the batch with each. The order of shards and hops is [`rotifer_ring::schedule`]'s, the
//! hops are [`rotifer_ring::Ring`]'s, the maths is the layer's; this file only joins the three.
//!
//! Source: "Rethinking Tensor Parallelism with Memory Deduplication", arXiv 2311.01635, section 3.

use std::cell::Cell;

use rotifer_device::{Region, Write};

use crate::build::Unit;
use crate::error::Result;
use crate::layer::Context;
use crate::sharded::{Sharded, Visit};

/// `y = f(x)` or `+=`, shard by shard.
///
/// # Errors
/// If a neighbour in the ring fails.
pub fn forward(
    cx: &Context<'_>,
    layer: &impl Sharded,
    unit: &Unit,
    x: Region,
    y: Region,
    write: Write,
) -> Result<()> {
    layer.begin_forward(cx, y, write);
    let mut first = true;
    for shards in unit.groups() {
        cx.ring.forward(cx.dev, &shards, |k, w| {
            let visit = Visit { rows: shards.cut.shard(shards.group, k), first, write };
            layer.forward(cx, &visit, w, x, y);
            first = false;
        })?;
    }
    Ok(())
}

/// `dx = f'(x) dy` or `+=`, and the gradient of every shard `+=`, shard by shard.
///
/// # Errors
/// If a neighbour in the ring fails.
pub fn backward(
    cx: &Context<'_>,
    layer: &impl Sharded,
    unit: &Unit,
    x: Region,
    dy: Region,
    dx: Region,
    write: Write,
) -> Result<()> {
    layer.begin_backward(cx, dy);
    let first = Cell::new(true);
    for shards in unit.groups() {
        let visit =
            |k| Visit { rows: shards.cut.shard(shards.group, k), first: first.get(), write };
        cx.ring.backward(
            cx.dev,
            &shards,
            |k, w| layer.backward_data(cx, &visit(k), w, x, dy, dx),
            |k, w, dw| {
                layer.backward_weights(cx, &visit(k), w, x, dy, dx, dw);
                first.set(false);
            },
        )?;
    }
    Ok(())
}
