//! In which order training sees its windows: a pure function, so that every rank and every resumed
//! run agrees without a word or a table.

use crate::hash::mix;

/// Rounds of the Feistel network. Four make a permutation that is indistinguishable from a random
/// one for large halves (Luby and Rackoff 1988); twice as many make up for halves of a few bits.
const ROUNDS: usize = 8;

/// A random permutation of `0..n` in O(1) memory.
///
/// A balanced Feistel network permutes the smallest domain of 4^k numbers that holds n; a result
/// outside of `0..n` is put through it again until it is inside (cycle walking; Black and Rogaway
/// 2002, "Ciphers with Arbitrary Finite Domains"). The domain is smaller than 4 n, so that takes
/// fewer than 4 turns on average.
///
/// ```
/// use rotifer::data::Shuffle;
/// let shuffle = Shuffle::new(10, 42, 0);
/// let mut all: Vec<u64> = (0..10).map(|i| shuffle.at(i)).collect();
/// all.sort();
/// assert_eq!(all, (0..10).collect::<Vec<u64>>());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shuffle {
    n: u64,
    half_bits: u32,
    keys: [u64; ROUNDS],
}

impl Shuffle {
    /// The permutation of `0..n` for one epoch of a seed.
    ///
    /// # Panics
    /// If n is 0.
    #[must_use]
    pub fn new(n: u64, seed: u64, epoch: u64) -> Shuffle {
        assert!(n > 0, "there is no permutation of nothing");
        let bits = u64::BITS - (n - 1).leading_zeros();
        // Hashed one after the other, so that (seed, epoch) and (epoch, seed) have other keys.
        let key = mix(mix(seed) ^ epoch);
        let keys = std::array::from_fn(|round| mix(key.wrapping_add(round as u64)));
        Shuffle { n, half_bits: bits.div_ceil(2), keys }
    }

    /// Where the permutation takes i.
    ///
    /// # Panics
    /// If i is not below n.
    #[must_use]
    pub fn at(&self, i: u64) -> u64 {
        assert!(i < self.n, "{i} is not in 0..{}", self.n);
        // Ends: the walk stays on i's cycle, which comes back to i itself at the latest.
        let mut x = self.permute(i);
        while x >= self.n {
            x = self.permute(x);
        }
        x
    }

    fn permute(&self, x: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (x >> self.half_bits, x & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        left << self.half_bits | right
    }
}

/// Which window is the i-th sample of a run. Samples go on over epochs without a gap; each epoch
/// has every window once. Sample i of step s is `s * batch + i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    num_windows: u64,
    seed: u64,
    shuffle: bool,
}

impl Order {
    /// The order of `num_windows` windows: another one each epoch, or always the order of the data.
    ///
    /// # Panics
    /// If there are no windows; see [`Dataset::require_windows`](super::Dataset::require_windows).
    #[must_use]
    pub fn new(num_windows: u64, seed: u64, shuffle: bool) -> Order {
        assert!(num_windows > 0, "there are no windows to order");
        Order { num_windows, seed, shuffle }
    }

    /// The window of sample `global_index`.
    #[must_use]
    pub fn sample(&self, global_index: u64) -> u64 {
        let (epoch, i) = (global_index / self.num_windows, global_index % self.num_windows);
        if self.shuffle { Shuffle::new(self.num_windows, self.seed, epoch).at(i) } else { i }
    }
}
