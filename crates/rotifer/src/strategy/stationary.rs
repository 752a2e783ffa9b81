//! Tensor parallelism (tp): each rank keeps its shard and sees the whole batch. Layers come in
//! pairs: the first is cut along its outputs (queries, keys and values by whole heads; the inner
//! matrix of an MLP), the second along its inputs, so between them nothing moves, and behind them
//! the ranks' shares are summed: two all-reduces of `[t, c]` per block in forward, two in backward.
//! Head and embedding are cut along the vocabulary; of the loss only three numbers per token move.
//!
//! Tuned as Megatron-LM: the sum of dx travels while the gradients of the weights are computed;
//! both embeddings share one sum. What is not cut (norms, dropout, residuals) is computed and kept
//! by every rank for the whole batch; Megatron's later sequence parallelism, which cuts it along
//! the tokens, is not there.
//!
//! Source: Shoeybi et al. 2019, "Megatron-LM", section 3.

use rotifer_device::{Arena, Device, Dtype, Purpose, Region, Write};
use rotifer_ring::schedule::Pass;
use rotifer_ring::{Comm, Subject};

use crate::build::Unit;
use crate::error::Result;
use crate::layer::Context;
use crate::sharded::{Sharded, Share, Visit};

/// What tensor parallelism needs on one rank.
#[derive(Debug)]
pub struct Stationary {
    comm: Comm,
    overlap: bool,
    /// This rank's share of a sum that is to be added to something: `[t, c]`.
    partial: Region,
}

/// Where the shares of a sum go.
#[derive(Clone, Copy)]
struct Sum {
    /// Where this rank puts its share, and finds the sum.
    share: Region,
    /// Where to add the sum, if that is elsewhere.
    add_to: Option<Region>,
}

impl Stationary {
    /// Takes room for shares of `partial_len` elements; none in a world of one.
    pub fn take(arena: &mut Arena, comm: &Comm, overlap: bool, partial_len: usize) -> Stationary {
        let len = if comm.world() == 1 { 0 } else { partial_len };
        let partial = arena.take(Purpose::Travel, Dtype::F32, len);
        Stationary { comm: comm.clone(), overlap, partial }
    }

    /// The communicator.
    #[must_use]
    pub const fn comm(&self) -> &Comm {
        &self.comm
    }

    /// `y = f(x)` or `+=`: this rank's shards, then the sum over the ranks if there is one.
    ///
    /// # Errors
    /// If another rank fails.
    pub fn forward(
        &self,
        cx: &Context<'_>,
        layer: &impl Sharded,
        unit: &Unit,
        x: Region,
        y: Region,
        write: Write,
    ) -> Result<()> {
        let write = layer.begin_forward(cx, y, write);
        let sum = self.sum(cx, layer.output(), y, write);
        let (y, write) = sum.map_or((y, write), |sum| (sum.share, Write::Set));
        for (i, home) in unit.homes().iter().enumerate() {
            let visit = Visit { span: home.span(), first: i == 0, write };
            layer.forward(cx, &visit, unit.held(home).0, x, y);
        }
        self.join(cx.dev, Subject { unit: unit.number(), pass: Pass::Forward }, sum, || ())
    }

    /// `dx = f'(x) dy` or `+=`, and the gradients of this rank's shards `+=`.
    ///
    /// # Errors
    /// If another rank fails.
    pub fn backward(
        &self,
        cx: &Context<'_>,
        layer: &impl Sharded,
        unit: &Unit,
        (x, dy, dx): (Region, Region, Region),
        write: Write,
    ) -> Result<()> {
        let sum = self.sum(cx, layer.input_gradient(), dx, write);
        let (dx, write) = sum.map_or((dx, write), |sum| (sum.share, Write::Set));
        // The last shard's own gradient needs nothing that the others must wait for.
        let subject = Subject { unit: unit.number(), pass: Pass::Backward };
        let beside = self.overlap && !layer.backward_weights_writes_dx();
        let last = unit.homes().len() - 1;
        for (i, home) in unit.homes().iter().enumerate() {
            let visit = Visit { span: home.span(), first: i == 0, write };
            let (w, dw) = unit.held(home);
            layer.backward_data(cx, &visit, w, x, dy, dx);
            let add = || layer.backward_weights(cx, &visit, w, x, dy, dx, dw);
            if i == last && beside {
                return self.join(cx.dev, subject, sum, add);
            }
            add();
        }
        self.join(cx.dev, subject, sum, || ())
    }

    /// Joins the online softmax of every rank's classes: `state` becomes that of all. states: room
    /// for the states of all ranks, `[n, t, 3]`; state: `[t, 3]`.
    ///
    /// # Errors
    /// If another rank fails.
    pub fn join_losses(&self, dev: &dyn Device, state: Region, states: Region) -> Result<()> {
        let (rank, world) = (self.comm.rank(), self.comm.world());
        let of = |k: usize| states.slice(k * state.len()..(k + 1) * state.len());
        dev.copy(state, of(rank));
        self.comm.all_gather(dev, of(rank), states)?;
        // In the order of ranks, so that all get the same bits.
        dev.copy(of(0), state);
        (1..world).for_each(|k| dev.loss_join(of(k), state));
        Ok(())
    }

    fn sum(&self, cx: &Context<'_>, share: Share, y: Region, write: Write) -> Option<Sum> {
        let Share::Sum { width } = share else { return None };
        if self.comm.world() == 1 {
            return None;
        }
        let y = y.first(cx.tokens() * width);
        Some(match write {
            Write::Set => Sum { share: y, add_to: None },
            Write::Add => Sum { share: self.partial.first(y.len()), add_to: Some(y) },
        })
    }

    /// Sums the shares, while `work` runs.
    fn join(
        &self,
        dev: &dyn Device,
        subject: Subject,
        sum: Option<Sum>,
        work: impl FnOnce(),
    ) -> Result<()> {
        let Some(Sum { share, add_to }) = sum else {
            work();
            return Ok(());
        };
        self.comm.all_reduce_beside(dev, Some(subject), share, work)?;
        if let Some(y) = add_to {
            dev.add(share, y);
        }
        Ok(())
    }
}
