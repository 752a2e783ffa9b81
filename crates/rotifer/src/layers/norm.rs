//! Layer norm and RMS norm.

use rotifer_device::{Dtype, Mat, Norm, Region, Write};

use super::linear::expect_width;
use crate::build::Builder;
use crate::error::Result;
use crate::layer::{Context, Layer};
use crate::params::Init;

/// `y = norm(x) * w + b` over the last dimension. x, y: `[t, c]`; w, b: `[c]`.
///
/// Its parameters are small and every rank has them whole; their gradients are summed over the
/// ranks once a step. Its output is made again in backward instead of being kept.
///
/// Bytes: holds c or 2c weights on every rank; saves 2 t; nothing travels.
///
/// Source: `torch.nn.LayerNorm`, `torch.nn.RMSNorm`.
#[derive(Clone, Debug)]
pub struct NormLayer {
    name: String,
    width: usize,
    norm: Norm,
    weight: (Region, Region),
    bias: (Region, Region),
    stats: Region,
}

impl NormLayer {
    /// A norm over `width` columns with weights `name.weight` and, for a layer norm, `name.bias`.
    #[must_use]
    pub fn new(name: &str, width: usize, norm: Norm) -> NormLayer {
        let none = Region::empty(Dtype::F32);
        NormLayer {
            name: name.into(),
            width,
            norm,
            weight: (none, none),
            bias: (none, none),
            stats: none,
        }
    }
}

impl Layer for NormLayer {
    fn width_out(&self, width_in: usize) -> usize {
        width_in
    }

    fn build(&mut self, b: &mut Builder<'_>, width_in: usize) -> Result<()> {
        expect_width(&self.name, self.width, width_in)?;
        self.weight = b.replicated(format!("{}.weight", self.name), self.width, Init::Ones)?;
        if matches!(self.norm, Norm::Layer { .. }) {
            self.bias = b.replicated(format!("{}.bias", self.name), self.width, Init::Zeros)?;
        }
        self.stats = b.kept(Dtype::F32, 2 * b.tokens_max());
        Ok(())
    }

    fn forward(&self, cx: &Context<'_>, x: Region, y: Region, write: Write) -> Result<()> {
        assert!(write == Write::Set, "a norm cannot add; Residual refuses to end in one");
        let (x, y) = (Mat::new(x, cx.tokens(), self.width), Mat::new(y, cx.tokens(), self.width));
        let stats = self.stats.first(2 * cx.tokens());
        cx.dev.norm(self.norm, x, self.weight.0, self.bias.0, y, stats);
        Ok(())
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        x: Region,
        dy: Region,
        dx: Region,
        write: Write,
    ) -> Result<()> {
        let mat = |r| Mat::new(r, cx.tokens(), self.width);
        let stats = self.stats.first(2 * cx.tokens());
        let (w, dw) = self.weight;
        cx.dev.norm_backward(self.norm, mat(x), w, stats, mat(dy), mat(dx), write, dw, self.bias.1);
        Ok(())
    }

    fn is_cheap(&self) -> bool {
        true
    }

    fn can_add(&self) -> bool {
        false
    }
}
