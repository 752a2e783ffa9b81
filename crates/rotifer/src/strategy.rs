//! How shards meet data.
//!
//! A layer is the maths of one shard ([`Sharded`]); a strategy drives it over all shards. Rotation
//! is the one strategy so far; one rank alone is rotation without a hop.

pub mod rotated;

use rotifer_device::{Region, Write};

use crate::build::{Builder, Unit};
use crate::error::Result;
use crate::layer::{Context, Layer};
use crate::sharded::Sharded;

/// A sharded layer together with this rank's part of its weights: a [`Layer`].
#[derive(Debug)]
pub struct Driven<L> {
    layer: L,
    unit: Option<Unit>,
}

impl<L: Sharded> Driven<L> {
    /// Lets a strategy drive `layer`.
    pub const fn new(layer: L) -> Driven<L> {
        Driven { layer, unit: None }
    }

    /// This rank's part of the weights.
    ///
    /// # Panics
    /// If the layer has not been built.
    pub fn unit(&self) -> &Unit {
        self.unit.as_ref().expect("layers are built before they run")
    }
}

impl<L: Sharded> Layer for Driven<L> {
    fn width_out(&self, width_in: usize) -> usize {
        self.layer.width_out(width_in)
    }

    fn build(&mut self, b: &mut Builder<'_>, width_in: usize) -> Result<()> {
        let unit = b.unit(self.layer.spec())?;
        self.layer.build(b, width_in, unit.cut().shard_rows_max())?;
        self.unit = Some(unit);
        Ok(())
    }

    fn forward(&self, cx: &Context<'_>, x: Region, y: Region, write: Write) -> Result<()> {
        rotated::forward(cx, &self.layer, self.unit(), x, y, write)
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        x: Region,
        dy: Region,
        dx: Region,
        write: Write,
    ) -> Result<()> {
        rotated::backward(cx, &self.layer, self.unit(), x, dy, dx, write)
    }
}
