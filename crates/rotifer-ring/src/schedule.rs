//! Who holds which shard at which step. Pure arithmetic; start reading here.
//!
//! N ranks stand in a ring and a unit is cut in N shards; shard k's home is rank k. One pass has
//! N steps. In forward every shard hops to rank + 1 after each step, in backward to rank - 1:
//!
//! ```text
//! forward, N = 4                        backward, N = 4
//!          rank 0  1  2  3                       rank 0  1  2  3
//! step 0        0  1  2  3              step 0        0  1  2  3
//! step 1        3  0  1  2              step 1        1  2  3  0
//! step 2        2  3  0  1              step 2        2  3  0  1
//! step 3        1  2  3  0              step 3        3  0  1  2
//! ```
//!
//! Both passes begin at home, so a pass needs no hop before its first step, and between passes
//! nothing is displaced. In backward a shard's gradient follows it: rank k - 1 begins the sum at
//! step 1, every rank that the shard visits adds its contribution, and after step N - 1 the sum
//! hops from rank k + 1 home, where rank k's own contribution of step 0 waits. So weights make
//! N - 1 hops in each pass and gradients N - 1: 3 (N - 1)/N of a unit per rank and step.

use std::ops::Range;

/// A pass over the shards of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Shards hop to rank + 1.
    Forward,
    /// Shards hop to rank - 1, their gradients behind them.
    Backward,
}

impl Pass {
    /// The shard that `rank` works on at `step`.
    ///
    /// ```
    /// use rotifer_ring::schedule::Pass;
    /// assert_eq!(Pass::Forward.shard(0, 1, 4), 3);
    /// assert_eq!(Pass::Backward.shard(0, 1, 4), 1);
    /// ```
    #[must_use]
    pub const fn shard(self, rank: usize, step: usize, world: usize) -> usize {
        match self {
            Pass::Forward => (rank + world - step) % world,
            Pass::Backward => (rank + step) % world,
        }
    }

    /// The rank that a hop of this pass goes to.
    #[must_use]
    pub const fn to(self, rank: usize, world: usize) -> usize {
        match self {
            Pass::Forward => (rank + 1) % world,
            Pass::Backward => (rank + world - 1) % world,
        }
    }

    /// The rank that a hop of this pass comes from.
    #[must_use]
    pub const fn from(self, rank: usize, world: usize) -> usize {
        match self {
            Pass::Forward => Pass::Backward.to(rank, world),
            Pass::Backward => Pass::Forward.to(rank, world),
        }
    }
}

/// Part `index` of `rows` cut in `parts`: contiguous, in order, sizes differing by at most one row.
/// Nothing need divide; parts may be empty.
///
/// ```
/// use rotifer_ring::schedule::part;
/// assert_eq!((0..3).map(|k| part(10, 3, k)).collect::<Vec<_>>(), [0..3, 3..6, 6..10]);
/// ```
#[must_use]
pub const fn part(rows: usize, parts: usize, index: usize) -> Range<usize> {
    rows * index / parts..rows * (index + 1) / parts
}

/// How the rows of a unit are cut: into groups that rotate one after the other, each into one shard
/// per rank. More than one group only bounds the size of what travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    rows: usize,
    world: usize,
    groups: usize,
}

impl Cut {
    /// The fewest groups whose shards have at most `shard_rows_max` rows.
    ///
    /// # Panics
    /// If the world is empty or shards may have no rows.
    #[must_use]
    pub fn new(rows: usize, world: usize, shard_rows_max: usize) -> Cut {
        assert!(
            world > 0 && shard_rows_max > 0,
            "a world of {world}, shards of {shard_rows_max} rows"
        );
        let groups = rows.div_ceil(world).div_ceil(shard_rows_max).max(1);
        Cut { rows, world, groups }
    }

    /// The fewest groups of at most `group_rows_max` rows each, over all shards: for whoever holds
    /// a whole group at once.
    ///
    /// # Panics
    /// If the world is empty or groups may have no rows.
    #[must_use]
    pub fn in_groups(rows: usize, world: usize, group_rows_max: usize) -> Cut {
        assert!(
            world > 0 && group_rows_max > 0,
            "a world of {world}, groups of {group_rows_max} rows"
        );
        Cut { rows, world, groups: rows.div_ceil(group_rows_max).max(1) }
    }

    /// Number of groups.
    #[must_use]
    pub const fn groups(&self) -> usize {
        self.groups
    }

    /// Number of shards of a group: that of ranks.
    #[must_use]
    pub const fn world(&self) -> usize {
        self.world
    }

    /// Rows of the whole unit.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// The rows of shard `k` of a group.
    #[must_use]
    pub const fn shard(&self, group: usize, k: usize) -> Range<usize> {
        part(self.rows, self.groups * self.world, group * self.world + k)
    }

    /// The rows of a whole group.
    #[must_use]
    pub const fn group(&self, group: usize) -> Range<usize> {
        part(self.rows, self.groups, group)
    }

    /// Rows of the largest group.
    #[must_use]
    pub const fn group_rows_max(&self) -> usize {
        self.rows.div_ceil(self.groups)
    }

    /// Rows of the largest shard.
    #[must_use]
    pub const fn shard_rows_max(&self) -> usize {
        self.rows.div_ceil(self.groups * self.world)
    }
}
