//! Fully sharded data parallelism (fsdp): each rank holds a shard of every unit; a unit is
//! all-gathered where it is used, in forward and again in backward, and its gradient is
//! reduce-scattered.
//!
//! Tuned as PyTorch's FSDP2: the next unit is gathered while this one computes, the last one's
//! gradients are scattered meanwhile, what the end of forward gathered serves the beginning of
//! backward. Units are those of the layers (a linear layer, an MLP, 4096 rows of a table), smaller
//! than the blocks that users of FSDP2 wrap, so less is whole at once for the same bytes moved.
//! With `reshard_after_forward = false` units stay whole from forward to backward.
//!
//! Source: Zhao et al. 2023, "PyTorch FSDP"; `torch.distributed.fsdp.fully_shard`.

use rotifer_device::{Device, Dtype, Region};
use rotifer_ring::Gathering;
use rotifer_ring::schedule::Pass;

use crate::build::Unit;
use crate::error::Result;
use crate::sharded::Span;

/// `visit(which rows, weights)` for every group of the unit.
///
/// # Errors
/// If another rank fails.
pub fn forward(
    gathering: &Gathering,
    dev: &dyn Device,
    unit: &Unit,
    mut visit: impl FnMut(Span, Region),
) -> Result<()> {
    for (group, home) in unit.homes().iter().enumerate() {
        let weights = gathering.weights(dev, Pass::Forward, unit.first_use() + group)?;
        visit(home.span(), weights);
    }
    Ok(())
}

/// `data(which rows, weights)`, then `add(which rows, weights, gradient)` for every group, in the
/// reverse order of forward.
///
/// # Errors
/// If another rank fails.
pub fn backward(
    gathering: &Gathering,
    dev: &dyn Device,
    unit: &Unit,
    mut data: impl FnMut(Span, Region),
    mut add: impl FnMut(Span, Region, Region),
) -> Result<()> {
    for (group, home) in unit.homes().iter().enumerate().rev() {
        let number = unit.first_use() + group;
        let weights = if unit.backward_reads_weights() {
            gathering.weights(dev, Pass::Backward, number)?
        } else {
            Region::empty(Dtype::F32)
        };
        data(home.span(), weights);
        gathering.gradient(dev, number, |gradient| add(home.span(), weights, gradient))?;
    }
    Ok(())
}
