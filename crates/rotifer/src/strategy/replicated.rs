//! Data parallelism (ddp): every rank has all weights and computes its own slice of the batch;
//! gradients are all-reduced in buckets, the last layers' while the first ones still run backward.
//!
//! Tuned as PyTorch's `DistributedDataParallel`: buckets of 25 MiB that are views of the gradients
//! (`gradient_as_bucket_view`), begun as soon as their last gradient is complete, in the last
//! micro-batch only (`no_sync`). With zero1 the ranks share the optimiser: a bucket is
//! reduce-scattered, each rank updates its part, and the weights are all-gathered (Rajbhandari et
//! al. 2020, stage 1; PyTorch's `ZeroRedundancyOptimizer`).
//!
//! Source: Li et al. 2020, "PyTorch Distributed".

use rotifer_device::Region;
use rotifer_ring::Replicas;

use crate::build::Unit;
use crate::sharded::Span;

/// Bytes of gradients that a bucket is closed at, PyTorch's default.
pub const BUCKET_BYTES: usize = 25 << 20;

/// `data(which rows, weights)`, then `add(which rows, weights, gradient)` for every group of the
/// unit; then the group's gradients have one contribution more.
pub fn backward(
    replicas: &Replicas,
    unit: &Unit,
    mut data: impl FnMut(Span, Region),
    mut add: impl FnMut(Span, Region, Region),
) {
    for home in unit.homes() {
        let (weights, gradients) = unit.held(home);
        data(home.span(), weights);
        add(home.span(), weights, gradients);
        replicas.contributed(home.bucket());
    }
}
