//! Combinators: they derive backward from their parts, and decide what is kept between them.

use rotifer_device::{Dtype, Region, Write};

use crate::build::Builder;
use crate::error::{Error, Result};
use crate::layer::{Context, Layer};

/// What lies between two parts of a [`Seq`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    /// Kept from forward to backward.
    Kept(Region),
    /// Scratch, made again in backward by the part before, which is cheap.
    Remade(Region),
    /// Scratch that backward does not read.
    Passing(Region),
}

impl Link {
    const fn region(self) -> Region {
        match self {
            Link::Kept(r) | Link::Remade(r) | Link::Passing(r) => r,
        }
    }
}

/// `y = f_n(... f_2(f_1(x)))`.
///
/// Backward runs the parts in reverse: `dx = f_1'(x) ... f_n'(x_n) dy`. What lies between two parts
/// is kept, unless the part before is cheap to run again or the part behind does not read it.
///
/// Bytes: saves t x (columns of each kept link); scratch for the other links and for two gradients
/// between parts (none if all parts run in place).
#[derive(Default)]
pub struct Seq {
    parts: Vec<Box<dyn Layer>>,
    links: Vec<Link>,
    /// Gradients of the links; link i uses `gradients[i % 2]`.
    gradients: [Option<Region>; 2],
}

impl Seq {
    /// A sequence of no parts: add them with [`then`](Seq::then).
    #[must_use]
    pub fn new() -> Seq {
        Seq::default()
    }

    /// With one more part at the end.
    #[must_use]
    pub fn then(mut self, part: impl Layer + 'static) -> Seq {
        self.parts.push(Box::new(part));
        self
    }

    /// Columns of the links, for an input of `width_in` columns.
    fn link_widths(&self, width_in: usize) -> Vec<usize> {
        let inner = self.parts.split_last().map_or(&[][..], |(_, before)| before);
        let widths = inner.iter().scan(width_in, |width, part| {
            *width = part.width_out(*width);
            Some(*width)
        });
        widths.collect()
    }
}

impl std::fmt::Debug for Seq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Seq of {} parts", self.parts.len())
    }
}

impl Layer for Seq {
    fn width_out(&self, width_in: usize) -> usize {
        self.parts.iter().fold(width_in, |width, part| part.width_out(width))
    }

    fn build(&mut self, b: &mut Builder<'_>, width_in: usize) -> Result<()> {
        if self.parts.is_empty() {
            return Err(Error::Shape { what: "a Seq needs at least one part".into() });
        }
        let (t, train) = (b.tokens_max(), b.options().train);
        let widths = self.link_widths(width_in);
        self.links.clear();
        self.gradients = [None; 2];
        if train {
            for (i, &width) in widths.iter().enumerate() {
                self.links.push(if !self.parts[i + 1].backward_reads_input() {
                    Link::Passing(b.scratch(Dtype::F32, t * width))
                } else if self.parts[i].is_cheap()
                    && matches!(self.links.last(), None | Some(Link::Kept(_)))
                {
                    Link::Remade(b.scratch(Dtype::F32, t * width))
                } else {
                    Link::Kept(b.kept(Dtype::F32, t * width))
                });
            }
        }
        // Two buffers in turn serve the gradients of the links, or, without backward, the links.
        if !(train && self.runs_in_place()) {
            for odd in 0..2 {
                let width = widths.iter().skip(odd).step_by(2).max();
                self.gradients[odd] = width.map(|w| b.scratch(Dtype::F32, t * w));
            }
        }
        if !train {
            let pair = &self.gradients;
            let links = (0..widths.len()).map(|i| Link::Passing(pair[i % 2].expect("taken above")));
            self.links.extend(links);
        }
        let mut width = width_in;
        for part in &mut self.parts {
            b.scope(|b| part.build(b, width))?;
            width = part.width_out(width);
        }
        Ok(())
    }

    fn forward(&self, cx: &Context<'_>, x: Region, y: Region, write: Write) -> Result<()> {
        let mut input = x;
        for (part, link) in self.parts.iter().zip(&self.links) {
            part.forward(cx, input, link.region(), Write::Set)?;
            input = link.region();
        }
        let last = self.parts.last().expect("build refuses an empty Seq");
        last.forward(cx, input, y, write)
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        x: Region,
        dy: Region,
        dx: Region,
        write: Write,
    ) -> Result<()> {
        let input = |i: usize| if i == 0 { x } else { self.links[i - 1].region() };
        let mut dy = dy;
        for (i, part) in self.parts.iter().enumerate().rev() {
            if i > 0 && matches!(self.links[i - 1], Link::Remade(_)) {
                self.parts[i - 1].forward(cx, input(i - 1), input(i), Write::Set)?;
            }
            if i == 0 {
                part.backward(cx, x, dy, dx, write)?;
            } else {
                // All parts in place: dx itself carries the gradient.
                let dx = self.gradients[(i - 1) % 2].unwrap_or(dx);
                part.backward(cx, input(i), dy, dx, Write::Set)?;
                dy = dx;
            }
        }
        Ok(())
    }

    fn is_cheap(&self) -> bool {
        self.parts.iter().all(|part| part.is_cheap())
    }

    fn backward_reads_input(&self) -> bool {
        // A cheap first part is run again.
        self.parts.first().is_none_or(|part| part.backward_reads_input() || part.is_cheap())
    }

    fn can_add(&self) -> bool {
        self.parts.last().is_none_or(|part| part.can_add())
    }

    fn runs_in_place(&self) -> bool {
        self.parts.iter().all(|part| part.runs_in_place())
    }
}

/// `y = x + f(x)`. x, y: `[t, c]`.
///
/// Backward: `dx = dy + f'(x) dy`, in place on the stream's gradient.
///
/// Bytes: what f holds, saves and sends.
#[derive(Debug)]
pub struct Residual {
    body: Seq,
    width: usize,
}

impl Residual {
    /// A residual connection around `body`: a norm and a layer, usually. The last part of the body
    /// must have read all of dy before the first one adds to dx, so it needs two parts at least,
    /// and not all of them residual.
    #[must_use]
    pub const fn new(body: Seq) -> Residual {
        Residual { body, width: 0 }
    }
}

impl Layer for Residual {
    fn width_out(&self, width_in: usize) -> usize {
        width_in
    }

    fn build(&mut self, b: &mut Builder<'_>, width_in: usize) -> Result<()> {
        if self.body.parts.len() < 2 || self.body.runs_in_place() {
            let what = "the body of a Residual needs two parts at least, such as a norm and a \
                        layer, and not all of them residual";
            return Err(Error::Shape { what: what.into() });
        }
        if !self.body.can_add() {
            let what = "the body of a Residual cannot end in a norm, which does not add to its \
                        output; put the norm before the layer, or behind the Residual";
            return Err(Error::Shape { what: what.into() });
        }
        let got = self.body.width_out(width_in);
        if got != width_in {
            return Err(Error::Shape {
                what: format!(
                    "the body of a Residual maps {width_in} columns to {got}; both must be equal"
                ),
            });
        }
        self.width = width_in;
        self.body.build(b, width_in)
    }

    fn forward(&self, cx: &Context<'_>, x: Region, y: Region, write: Write) -> Result<()> {
        let len = cx.tokens() * self.width;
        match write {
            Write::Set => cx.dev.copy(x.first(len), y.first(len)),
            Write::Add => cx.dev.add(x.first(len), y.first(len)),
        }
        self.body.forward(cx, x, y, Write::Add)
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        x: Region,
        dy: Region,
        dx: Region,
        write: Write,
    ) -> Result<()> {
        let len = cx.tokens() * self.width;
        if dx != dy {
            match write {
                Write::Set => cx.dev.copy(dy.first(len), dx.first(len)),
                Write::Add => cx.dev.add(dy.first(len), dx.first(len)),
            }
        }
        self.body.backward(cx, x, dy, dx, Write::Add)
    }

    fn runs_in_place(&self) -> bool {
        true
    }
}
