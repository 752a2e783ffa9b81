//! What can be wrong with what a benchmark is asked for.

use super::Variant;

/// A benchmark that cannot be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A strategy that does not exist.
    #[error("there is no strategy {name:?}; {advice}")]
    UnknownVariant {
        /// Its name.
        name: String,
        /// The nearest one that exists, or all of them.
        advice: String,
    },
    /// A benchmark of nothing.
    #[error("a benchmark cannot have 0 {what}; ask for 1 or more")]
    Zero {
        /// Of which there are none.
        what: &'static str,
    },
    /// Text that is no number of bytes.
    #[error(
        "{text:?} is not a number of bytes; write it as 65536 or 4MiB (KiB, MiB, GiB, kB, MB, GB)"
    )]
    Bytes {
        /// The text.
        text: String,
    },
    /// Not one strategy is possible.
    #[error("nothing can be measured: {variant} on {ranks} rank(s): {cause}")]
    NothingMeasured {
        /// The first that was tried.
        variant: Variant,
        /// On so many ranks.
        ranks: usize,
        /// Why it is not possible.
        cause: String,
    },
}
