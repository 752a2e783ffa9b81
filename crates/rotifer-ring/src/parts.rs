//! How the ranks' parts of a buffer lie in it.

use std::ops::Range;
use std::sync::Arc;

use crate::schedule::Cut;

/// One group of a unit as a whole, in which every rank has a part: tensor behind tensor, and within
/// each the rows of rank 0, rank 1 and so on. What an all-gather fills and a reduce-scatter reads.
///
/// The part itself is either in place, within the whole, or compact: the same rows of each tensor,
/// one tensor behind the other, as a shard is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parts {
    cut: Cut,
    group: usize,
    widths: Widths,
}

/// Elements of a row of each tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Widths {
    /// Of the one tensor: collectives of even parts allocate nothing.
    One([usize; 1]),
    Many(Arc<[usize]>),
}

impl Parts {
    /// The parts of group `group` of a cut into one shard per rank, for tensors of these widths.
    #[must_use]
    pub const fn new(cut: Cut, group: usize, widths: Arc<[usize]>) -> Parts {
        Parts { cut, group, widths: Widths::Many(widths) }
    }

    /// Parts of `len` elements for each rank of `world`.
    #[must_use]
    pub fn even(world: usize, len: usize) -> Parts {
        Parts { cut: Cut::new(world, world, 1), group: 0, widths: Widths::One([len]) }
    }

    /// Elements of the whole.
    #[must_use]
    pub fn len(&self) -> usize {
        self.cut.group(self.group).len() * self.width()
    }

    /// Whether the whole has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Elements of rank `rank`'s part.
    #[must_use]
    pub fn len_of(&self, rank: usize) -> usize {
        self.cut.shard(self.group, rank).len() * self.width()
    }

    /// Where rank `rank`'s part is, tensor by tensor: in the whole, and in the compact part.
    pub fn segments(&self, rank: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + '_ {
        let (group, held) = (self.cut.group(self.group), self.cut.shard(self.group, rank));
        let first = held.start - group.start;
        let mut before = 0;
        self.widths().iter().map(move |&width| {
            let whole = before * group.len() + first * width;
            let part = before * held.len();
            let len = held.len() * width;
            before += width;
            (whole..whole + len, part..part + len)
        })
    }

    fn widths(&self) -> &[usize] {
        match &self.widths {
            Widths::One(width) => width,
            Widths::Many(widths) => widths,
        }
    }

    fn width(&self) -> usize {
        self.widths().iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_tile_whole_and_parts_1_to_7_ranks() {
        for world in 1..=7 {
            for (rows, group_rows_max) in [(20, 20), (20, 9), (3, 100)] {
                let cut = Cut::in_groups(rows, world, group_rows_max);
                for group in 0..cut.groups() {
                    let parts = Parts::new(cut, group, [5, 1, 3].into());
                    let mut seen = vec![0; parts.len()];
                    for rank in 0..world {
                        let mut compact = 0;
                        for (whole, part) in parts.segments(rank) {
                            assert_eq!((whole.len(), compact), (part.len(), part.start));
                            compact = part.end;
                            seen[whole].iter_mut().for_each(|n| *n += 1);
                        }
                        assert_eq!(compact, parts.len_of(rank));
                    }
                    assert!(seen.iter().all(|n| *n == 1), "{world} ranks, {rows} rows: {seen:?}");
                }
            }
        }
    }
}
