//! Whole replicas whose gradients are summed while backward still runs: what data parallelism
//! (DDP) moves, and with shared optimiser state (ZeRO-1) as well.

use std::cell::RefCell;

use rotifer_device::{Device, Region, Write};

use crate::comm::Pending;
use crate::operation::Operation;
use crate::schedule::Pass;
use crate::{Comm, Parts, Result, Subject};

/// Gradients that are summed over the ranks in one go, as soon as the last of them is complete.
#[derive(Clone, Debug)]
pub struct Bucket {
    /// Number of the first unit in it, for messages.
    pub unit: u32,
    /// This rank's gradients; in the end the sums.
    pub gradients: Region,
    /// If ranks share the optimiser's work: what of it is whose, and the weights. Then only this
    /// rank's own part of the gradients becomes a sum; what the others become is of no use.
    pub shared: Option<(Parts, Region)>,
    /// How many contributions make the gradients complete in one backward pass.
    pub contributions: usize,
}

/// The buckets of one rank.
#[derive(Debug)]
pub struct Replicas {
    comm: Comm,
    overlap: bool,
    buckets: Vec<Bucket>,
    state: RefCell<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Whether the backward pass to come is the last before the gradients are used.
    last: bool,
    /// Contributions that each bucket still waits for.
    missing: Vec<usize>,
    pending: Vec<Pending>,
}

impl Replicas {
    /// Buckets over `comm`. With `overlap` their sums travel while backward goes on.
    #[must_use]
    pub fn new(comm: Comm, overlap: bool, buckets: Vec<Bucket>) -> Replicas {
        let state = State {
            last: false,
            missing: vec![0; buckets.len()],
            pending: Vec::with_capacity(buckets.len()),
        };
        Replicas { comm, overlap, buckets, state: RefCell::new(state) }
    }

    /// The communicator.
    #[must_use]
    pub const fn comm(&self) -> &Comm {
        &self.comm
    }

    /// Clears all gradients.
    pub fn clear(&self, dev: &dyn Device) {
        for bucket in &self.buckets {
            dev.fill(bucket.gradients, 0.0);
        }
    }

    /// A backward pass comes next; `last` if its gradients are the last to be added up before
    /// [`settle`](Replicas::settle).
    pub fn begin(&self, last: bool) {
        let mut state = self.state.borrow_mut();
        state.last = last;
        for (missing, bucket) in state.missing.iter_mut().zip(&self.buckets) {
            *missing = bucket.contributions;
        }
    }

    /// A contribution to a bucket's gradients is complete. All ranks say so in the same order.
    ///
    /// # Panics
    /// If the bucket waits for no more in this pass.
    pub fn contributed(&self, bucket: usize) {
        let state = &mut *self.state.borrow_mut();
        assert!(state.missing[bucket] > 0, "bucket {bucket} is complete already");
        state.missing[bucket] -= 1;
        if state.last && self.overlap && state.missing[bucket] == 0 {
            let bucket = &self.buckets[bucket];
            state.pending.push(self.comm.begin(subject(bucket, Pass::Backward), sum(bucket)));
        }
    }

    /// Waits until all gradients are sums over the ranks. To be called once after the last pass.
    ///
    /// # Errors
    /// If a rank is silent, out of step or has failed.
    pub fn settle(&self, dev: &dyn Device) -> Result<()> {
        let state = &mut *self.state.borrow_mut();
        for pending in state.pending.drain(..) {
            self.comm.complete(dev, pending)?;
        }
        for (bucket, missing) in self.buckets.iter().zip(&state.missing) {
            // What became complete in a last pass with overlap was begun then; a bucket that waits
            // for no contribution never becomes so.
            let begun = self.overlap && state.last && bucket.contributions > 0 && *missing == 0;
            if !begun {
                self.comm.run(dev, subject(bucket, Pass::Backward), sum(bucket))?;
            }
        }
        Ok(())
    }

    /// Makes the weights whole again, of which each rank has changed its own part.
    ///
    /// # Errors
    /// If a rank is silent, out of step or has failed.
    pub fn refresh(&self, dev: &dyn Device) -> Result<()> {
        for bucket in &self.buckets {
            if let Some((parts, weights)) = &bucket.shared {
                let (parts, all) = (parts.clone(), *weights);
                let gather = Operation::AllGather { parts, mine: None, all };
                self.comm.run(dev, subject(bucket, Pass::Forward), gather)?;
            }
        }
        Ok(())
    }
}

fn subject(bucket: &Bucket, pass: Pass) -> Option<Subject> {
    Some(Subject { unit: bucket.unit, pass })
}

fn sum(bucket: &Bucket) -> Operation {
    match &bucket.shared {
        None => Operation::AllReduce { x: bucket.gradients },
        Some((parts, _)) => {
            let (parts, all) = (parts.clone(), bucket.gradients);
            Operation::ReduceScatter { parts, all, mine: None, write: Write::Set }
        }
    }
}
