//! Dropout.

use rotifer_device::{Region, Write};

use crate::build::Builder;
use crate::error::Result;
use crate::layer::{Context, Layer, Phase};

/// `y = x / (1 - p)` with probability 1 - p, else 0; the identity in evaluation. x, y: `[t, c]`.
///
/// The mask is a function of (seed, step, layer, place in the global batch), so it is the same for
/// any N, and backward makes it again.
///
/// Bytes: holds, saves and sends nothing.
///
/// Source: `torch.nn.Dropout`.
#[derive(Clone, Debug)]
pub struct Dropout {
    p: f32,
    width: usize,
    layer: u64,
}

impl Dropout {
    /// Dropout with probability `p`.
    ///
    /// # Panics
    /// If p is not in [0, 1).
    #[must_use]
    pub fn new(p: f32) -> Dropout {
        assert!((0.0..1.0).contains(&p), "a dropout probability of {p} is not in [0, 1)");
        Dropout { p, width: 0, layer: 0 }
    }

    fn apply(&self, cx: &Context<'_>, x: Region, y: Region, write: Write) {
        let len = cx.tokens() * self.width;
        let (x, y) = (x.first(len), y.first(len));
        match (cx.phase, write) {
            (Phase::Train { step }, _) => {
                let (stream, first) = cx.stream(self.layer, step, self.width);
                cx.dev.dropout(stream, first, self.p, x, y, write);
            }
            (Phase::Evaluate, Write::Set) => cx.dev.copy(x, y),
            (Phase::Evaluate, Write::Add) => cx.dev.add(x, y),
        }
    }
}

impl Layer for Dropout {
    fn width_out(&self, width_in: usize) -> usize {
        width_in
    }

    fn build(&mut self, b: &mut Builder<'_>, width_in: usize) -> Result<()> {
        self.width = width_in;
        self.layer = b.next_layer();
        Ok(())
    }

    fn forward(&self, cx: &Context<'_>, x: Region, y: Region, write: Write) -> Result<()> {
        self.apply(cx, x, y, write);
        Ok(())
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        _x: Region,
        dy: Region,
        dx: Region,
        write: Write,
    ) -> Result<()> {
        self.apply(cx, dy, dx, write);
        Ok(())
    }

    fn backward_reads_input(&self) -> bool {
        false
    }
}
