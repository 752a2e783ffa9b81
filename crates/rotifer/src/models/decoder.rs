//! A decoder: embeddings, a body of layers, a final norm, a language-model head.

use rotifer_device::{Dtype, Region, Write};

use super::Model;
use crate::build::Builder;
use crate::error::{Error, Result};
use crate::layer::{Context, Layer};
use crate::layers::{Embedding, LmHead, NormLayer, Seq, embed};

/// `loss = head(norm(body(sum of embeddings)))`.
///
/// The stream x: `[t, c]` enters the body and leaves it; both are kept. The normed stream and the
/// stream's gradient are scratch.
#[derive(Debug)]
pub struct Decoder {
    embeddings: Vec<Embedding>,
    body: Seq,
    norm: NormLayer,
    head: LmHead,
    width: usize,
    regions: Option<Regions>,
}

#[derive(Clone, Copy, Debug)]
struct Regions {
    /// The stream before the body.
    x0: Region,
    /// The stream behind the body.
    x1: Region,
    /// The normed stream, and its gradient.
    normed: Region,
    dnormed: Region,
    /// The stream's gradient behind the body, and before it; one region if the body runs in place.
    dx1: Region,
    dx0: Region,
    /// One normed row per batch row, and their logits.
    picked: Region,
    logits: Region,
}

impl Decoder {
    /// A decoder of these parts.
    #[must_use]
    pub const fn new(
        embeddings: Vec<Embedding>,
        body: Seq,
        norm: NormLayer,
        head: LmHead,
    ) -> Decoder {
        Decoder { embeddings, body, norm, head, width: 0, regions: None }
    }

    fn regions(&self) -> Regions {
        self.regions.expect("models are built before they run")
    }

    /// Up to the normed stream.
    fn stream(&self, cx: &Context<'_>) -> Result<Region> {
        let Regions { x0, x1, normed, .. } = self.regions();
        let len = cx.tokens() * self.width;
        // The whole region: on a ring in place it is the slot that other slices pass through.
        embed(cx, &self.embeddings, x0)?;
        let (x0, x1, normed) = (x0.first(len), x1.first(len), normed.first(len));
        self.body.forward(cx, x0, x1, Write::Set)?;
        self.norm.forward(cx, x1, normed, Write::Set)?;
        Ok(normed)
    }
}

impl Model for Decoder {
    fn build(&mut self, b: &mut Builder<'_>) -> Result<()> {
        let Some(width) = self.embeddings.first().map(Embedding::width) else {
            return Err(Error::Shape { what: "a decoder needs at least one embedding".into() });
        };
        self.width = width;
        let (t, rows) = (b.tokens_max(), b.options().logits_rows);
        let train = usize::from(b.options().train);
        b.scope(|b| {
            let dx1 = b.scratch(Dtype::F32, t * width * train);
            self.regions = Some(Regions {
                x0: b.kept(Dtype::F32, t * width),
                x1: b.kept(Dtype::F32, t * width),
                normed: b.scratch(Dtype::F32, t * width),
                dnormed: b.scratch(Dtype::F32, t * width * train),
                dx1,
                dx0: if self.body.runs_in_place() {
                    dx1
                } else {
                    b.scratch(Dtype::F32, t * width * train)
                },
                picked: b.scratch(Dtype::F32, rows * width),
                logits: b.scratch(Dtype::F32, rows * self.head.classes()),
            });
            for embedding in &mut self.embeddings {
                if embedding.width() != width {
                    let (layer, got) = ("embedding".into(), embedding.width());
                    return Err(Error::Width { layer, expected: width, got });
                }
                b.scope(|b| embedding.build(b))?;
            }
            let leaves = self.body.width_out(width);
            if leaves != width {
                let layer = "decoder body".into();
                return Err(Error::Width { layer, expected: width, got: leaves });
            }
            b.scope(|b| self.body.build(b, width))?;
            b.scope(|b| self.norm.build(b, width))?;
            b.scope(|b| self.head.build(b, width))
        })
    }

    fn forward(&self, cx: &Context<'_>) -> Result<()> {
        let normed = self.stream(cx)?;
        self.head.forward(cx, normed)
    }

    fn backward(&self, cx: &Context<'_>) -> Result<()> {
        let Regions { x0, x1, normed, dnormed, dx1, dx0, .. } = self.regions();
        let part = |r: Region| r.first(cx.tokens() * self.width);
        // Nothing has touched the normed stream since forward.
        self.head.backward(cx, part(normed), part(dnormed))?;
        self.norm.backward(cx, part(x1), part(dnormed), part(dx1), Write::Set)?;
        self.body.backward(cx, part(x0), part(dx1), part(dx0), Write::Set)?;
        for embedding in self.embeddings.iter().rev() {
            // The whole region, as in forward.
            embedding.backward(cx, dx0)?;
        }
        Ok(())
    }

    fn logits(&self, cx: &Context<'_>, positions: &[usize]) -> Result<Region> {
        let Regions { picked, logits, .. } = self.regions();
        let (rows, seq, c) = (cx.rows(), cx.batch.seq, self.width);
        let normed = self.stream(cx)?;
        for (row, position) in positions.iter().enumerate() {
            let at = (row * seq + position) * c;
            cx.dev.copy(normed.slice(at..at + c), picked.slice(row * c..(row + 1) * c));
        }
        self.head.logits(cx, picked, logits, rows)?;
        Ok(logits.first(rows * self.head.classes()))
    }

    fn classes(&self) -> usize {
        self.head.classes()
    }
}
