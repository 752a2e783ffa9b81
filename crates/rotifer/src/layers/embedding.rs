//! Embedding tables, cut along the vocabulary.

use rotifer_device::{Mat, Region, Write};
use rotifer_ring::schedule::{Pass, part};
use rotifer_ring::{Ring, Subject, Tour};

use crate::build::{Builder, Tensor, Unit, UnitSpec};
use crate::error::{Error, Result};
use crate::layer::Context;
use crate::params::{Init, Layout};
use crate::sharded::{Seen, Sharded, Share, Visit};
use crate::strategy::{self, Driver, Strategy};

/// What moves so that tokens and table rows meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmbeddingRoute {
    /// Whichever of the two is fewer bytes, forward and backward together.
    Fewest,
    /// The table's shards rotate: 2 (N-1)/N v c elements per rank and step.
    Table,
    /// The shards stay; every rank's ids and the rows found so far tour the ring: (2N - 1) t c.
    Rows,
}

/// Which ids look the table up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdSource {
    /// The tokens.
    Tokens,
    /// Their positions within the row.
    Positions,
}

/// `y[i] = table[ids[i]]` or `+=`. table: `[v, c]`, cut along v; y: `[t, c]`.
///
/// Backward: `dtable[ids[i]] += dy[i]`; there is no dx.
///
/// Bytes: holds v/N x c weights; saves nothing; a shard travels, or a block of ids and rows.
///
/// Source: `torch.nn.Embedding`. Which way is cheaper is not in the paper, whose table always
/// rotates.
#[derive(Debug)]
pub struct Embedding {
    table: Table,
    route: EmbeddingRoute,
    by_rows: bool,
    /// Blocks of tokens that tour one after the other.
    blocks: usize,
    unit: Option<Unit>,
}

/// The shard maths, for the route on which the table travels.
#[derive(Clone, Debug)]
struct Table {
    name: String,
    rows: usize,
    width: usize,
    init: Init,
    ids: IdSource,
}

impl Embedding {
    /// A table of `rows x width` with weights `name.weight`, initially normal with this deviation.
    #[must_use]
    pub fn new(name: &str, rows: usize, width: usize, std: f32, ids: IdSource) -> Embedding {
        let init = Init::Normal { std };
        let table = Table { name: name.into(), rows, width, init, ids };
        let route = EmbeddingRoute::Fewest;
        Embedding { table, route, by_rows: false, blocks: 1, unit: None }
    }

    /// With this route.
    #[must_use]
    pub fn route(self, route: EmbeddingRoute) -> Embedding {
        Embedding { route, ..self }
    }

    /// Columns of the table.
    #[must_use]
    pub const fn width(&self) -> usize {
        self.table.width
    }

    /// Asks for the table.
    ///
    /// # Errors
    /// If a unit of the same name has another shape.
    pub fn build(&mut self, b: &mut Builder<'_>) -> Result<()> {
        let (t, world, c) = (b.tokens_max(), b.world(), self.table.width);
        if self.table.ids == IdSource::Positions && self.table.rows < b.options().seq {
            let (rows, seq) = (self.table.rows, b.options().seq);
            let what = format!("rows of {seq} tokens need as many position embeddings, not {rows}");
            return Err(Error::Shape { what });
        }
        self.unit = Some(b.unit(self.table.spec())?);
        // Table: forward and gradient each N - 1 hops of a shard. Rows: N hops there, N - 1 back.
        let table_elements = 2 * (world - 1) * self.table.rows.div_ceil(world) * c;
        let rows_elements = (2 * world - 1) * t * (c + 1);
        self.by_rows = match self.route {
            // Only where shards rotate is there a choice.
            EmbeddingRoute::Rows if b.strategy() != Strategy::Rtp => {
                return Err(Error::RowsOnlyRotate { strategy: b.strategy() });
            }
            EmbeddingRoute::Fewest => {
                b.strategy() == Strategy::Rtp && rows_elements < table_elements
            }
            EmbeddingRoute::Table => false,
            EmbeddingRoute::Rows => true,
        };
        if self.by_rows {
            self.blocks = b.tour_blocks(c);
        }
        Ok(())
    }

    /// `y = table[ids]` or `+=`. Under tensor parallelism only of this rank's part of the table:
    /// see [`embed`].
    fn forward(&self, cx: &Context<'_>, y: Region, write: Write) -> Result<()> {
        match cx.driver {
            Driver::Rotated(ring) if self.by_rows => {
                self.tour(cx, ring, Pass::Forward, y, |table, first, ids, rows| {
                    cx.dev.embedding(ids, table, first, rows, write);
                })
            }
            _ => strategy::forward(cx, &self.table, self.unit(), y, y, write),
        }
    }

    /// `dtable[ids] += dy`.
    ///
    /// # Errors
    /// If another rank fails.
    pub fn backward(&self, cx: &Context<'_>, dy: Region) -> Result<()> {
        match cx.driver {
            Driver::Rotated(ring) if self.by_rows => {
                self.tour(cx, ring, Pass::Backward, dy, |table, first, ids, rows| {
                    cx.dev.embedding_backward(ids, rows, table, first);
                })
            }
            _ => strategy::backward(cx, &self.table, self.unit(), dy, dy, dy, Write::Add),
        }
    }

    /// Takes the ids and rows of every rank's slice past this rank's shards, block after block:
    /// `f(part of the table, its first row, ids, rows)`. `rows` is as long as the largest slice.
    fn tour(
        &self,
        cx: &Context<'_>,
        ring: &Ring,
        pass: Pass,
        rows: Region,
        f: impl Fn(Mat, usize, Region, Mat),
    ) -> Result<()> {
        let (rank, c) = (ring.comm().rank(), self.table.width);
        let ids = self.table.ids.region(cx);
        for block in 0..self.blocks {
            let tokens = |k| part(cx.batch.slices.rows(k).len() * cx.batch.seq, self.blocks, block);
            let start = tokens(rank).start;
            let tour = Tour {
                unit: self.unit().number(),
                ids: ids.slice(start..ids.len()),
                rows: rows.slice(start * c..rows.len()),
                width: c,
                bring_back: pass == Pass::Forward,
            };
            ring.tour(
                cx.dev,
                pass,
                &tour,
                |k| tokens(k).len(),
                |ids, rows| {
                    for shards in self.unit().shards() {
                        let held = shards.cut.shard(shards.group, rank);
                        let home = match pass {
                            Pass::Forward => shards.weights,
                            Pass::Backward => shards.gradients,
                        };
                        let table = Mat::new(home, held.len(), c);
                        f(table, held.start, ids, Mat::new(rows, ids.len(), c));
                    }
                },
            )?;
        }
        Ok(())
    }

    fn unit(&self) -> &Unit {
        self.unit.as_ref().expect("layers are built before they run")
    }
}

/// `y = sum over tables of table[ids]`.
///
/// Under tensor parallelism each rank looks up what its parts of the tables have, and one sum over
/// the ranks joins all tables.
///
/// # Errors
/// If another rank fails.
pub fn embed(cx: &Context<'_>, tables: &[Embedding], y: Region) -> Result<()> {
    let Some(first) = tables.first() else { return Ok(()) };
    let cut = match cx.driver {
        Driver::Stationary(stationary) if stationary.comm().world() > 1 => {
            Some((stationary, y.first(cx.tokens() * first.width())))
        }
        _ => None,
    };
    if let Some((_, y)) = cut {
        cx.dev.fill(y, 0.0);
    }
    for (i, table) in tables.iter().enumerate() {
        let set = i == 0 && cut.is_none();
        table.forward(cx, y, if set { Write::Set } else { Write::Add })?;
    }
    if let Some((stationary, y)) = cut {
        let subject = Subject { unit: first.unit().number(), pass: Pass::Forward };
        stationary.comm().all_reduce_beside(cx.dev, Some(subject), y, || ())?;
    }
    Ok(())
}

impl IdSource {
    /// The ids of the largest slice; a context's tokens are the first of them.
    const fn region(self, cx: &Context<'_>) -> Region {
        match self {
            IdSource::Tokens => cx.batch.ids,
            IdSource::Positions => cx.batch.positions,
        }
    }
}

impl Sharded for Table {
    fn spec(&self) -> UnitSpec {
        table_spec(&self.name, self.rows, self.width, self.init, false)
    }

    fn width_out(&self, _width_in: usize) -> usize {
        self.width
    }

    /// A shard fills the rows of the tokens that it has; others it leaves alone.
    fn output(&self) -> Share {
        Share::Columns
    }

    /// Ids have no gradient.
    fn input_gradient(&self) -> Share {
        Share::Columns
    }

    fn build(&mut self, _b: &mut Builder<'_>, _width_in: usize, _seen: Seen) -> Result<()> {
        Ok(())
    }

    fn forward(&self, cx: &Context<'_>, visit: &Visit, w: Region, _x: Region, y: Region) {
        let table = Mat::new(w, visit.rows(), self.width);
        let ids = self.ids.region(cx).first(cx.tokens());
        let y = Mat::new(y, cx.tokens(), self.width);
        cx.dev.embedding(ids, table, visit.span.first_row, y, visit.write);
    }

    fn backward_data(
        &self,
        _cx: &Context<'_>,
        _visit: &Visit,
        _w: Region,
        _x: Region,
        _dy: Region,
        _dx: Region,
    ) {
        // Ids have no gradient.
    }

    fn backward_weights(
        &self,
        cx: &Context<'_>,
        visit: &Visit,
        _w: Region,
        _x: Region,
        dy: Region,
        _dx: Region,
        dw: Region,
    ) {
        let table = Mat::new(dw, visit.rows(), self.width);
        let ids = self.ids.region(cx).first(cx.tokens());
        let dy = Mat::new(dy, cx.tokens(), self.width);
        cx.dev.embedding_backward(ids, dy, table, visit.span.first_row);
    }
}

/// The unit of a table `rows x width`, which an embedding and a tied head share.
pub(super) fn table_spec(
    name: &str,
    rows: usize,
    width: usize,
    init: Init,
    backward_reads_weights: bool,
) -> UnitSpec {
    UnitSpec {
        name: name.into(),
        rows,
        tensors: vec![Tensor {
            name: format!("{name}.weight"),
            width,
            layout: Layout::Rows,
            init,
            decay: true,
        }],
        blocks: Vec::new(),
        visit_rows_max: super::head::CLASSES_MAX,
        backward_reads_weights,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tied_table_is_one_unit_whatever_its_users_read() {
        let init = Init::Normal { std: 0.02 };
        let embedding = table_spec("wte", 257, 40, init, false);
        let head = table_spec("wte", 257, 40, init, true);
        assert_eq!((embedding.rows, &embedding.tensors), (head.rows, &head.tensors));
        assert_eq!(embedding.visit_rows_max, head.visit_rows_max);
    }
}
