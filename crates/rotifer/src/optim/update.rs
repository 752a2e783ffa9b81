//! Update rules.

use rotifer_device::{AdamW, Device, Region, Sgd};

use crate::params::Piece;

/// Which update rule, and its constants. Weight decay is decoupled and applies to matrices and
/// tables only, as is customary: neither to biases nor to norms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    /// `torch.optim.AdamW`: two moments per weight.
    AdamW {
        /// Decay rate of the first moment.
        beta1: f32,
        /// Decay rate of the second moment.
        beta2: f32,
        /// Added to the root of the second moment.
        eps: f32,
        /// Weight decay.
        weight_decay: f32,
    },
    /// `torch.optim.SGD` with momentum, decay decoupled: one buffer per weight, none without
    /// momentum.
    Sgd {
        /// Momentum.
        momentum: f32,
        /// Weight decay.
        weight_decay: f32,
    },
}

impl Optimizer {
    /// Numbers kept per weight.
    #[must_use]
    pub fn states(&self) -> usize {
        self.state_names().len()
    }

    /// What these are called in checkpoints: PyTorch's names.
    #[must_use]
    pub fn state_names(&self) -> &'static [&'static str] {
        match self {
            Optimizer::AdamW { .. } => &["exp_avg", "exp_avg_sq"],
            Optimizer::Sgd { momentum, .. } if *momentum != 0.0 => &["momentum_buffer"],
            Optimizer::Sgd { .. } => &[],
        }
    }

    /// Update number `step`, from 1, of one piece. `decay` says whether weight decay applies to it.
    pub fn update(
        &self,
        dev: &dyn Device,
        piece: &Piece,
        lr: f64,
        decay: bool,
        grad_scale: f32,
        step: u64,
    ) {
        let lr = lr as f32;
        let decayed = |weight_decay| if decay { weight_decay } else { 0.0 };
        match *self {
            Optimizer::AdamW { beta1, beta2, eps, weight_decay } => {
                let weight_decay = decayed(weight_decay);
                let rule = AdamW { lr, beta1, beta2, eps, weight_decay, step, grad_scale };
                let (m, v) = (piece.states[0], piece.states[1]);
                dev.adamw(&rule, piece.weights, piece.gradients, m, v);
            }
            Optimizer::Sgd { momentum, weight_decay } => {
                let rule = Sgd { lr, momentum, weight_decay: decayed(weight_decay), grad_scale };
                let none = Region::empty(piece.weights.dtype());
                let m = piece.states.first().copied().unwrap_or(none);
                dev.sgd(&rule, piece.weights, piece.gradients, m);
            }
        }
    }
}
