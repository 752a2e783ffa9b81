//! Where a run that goes on takes up its count.

use super::Trainer;

impl<M> Trainer<'_, M> {
    /// Updates of the weights so far: what the learning rate, dropout and the optimiser's
    /// corrections are functions of.
    #[must_use]
    pub const fn updates(&self) -> u64 {
        self.step
    }

    /// Goes on as after so many updates. Weights and optimiser state must be those of that moment.
    pub const fn set_updates(&mut self, updates: u64) {
        self.step = updates;
    }
}
