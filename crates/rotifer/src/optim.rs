//! The update: which rule, at which learning rate.

mod lr;
mod update;

pub use lr::{LrSchedule, Shape};
pub use update::Optimizer;
