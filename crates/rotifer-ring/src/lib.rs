//! Moves shards between ranks.
//!
//! This crate knows bytes and ranks; it does not know layers. Read [`schedule`] first, then
//! [`Ring`], which is the rotation itself; [`Comm`] is one rank's end of a transport, and
//! [`launch`] starts the ranks.

mod comm;
mod error;
pub mod launch;
mod ring;
pub mod schedule;
mod transport;

pub use comm::{Comm, Hop, HopMode, Lane, Tag, Traffic};
pub use error::{Collective, Error, Place, Result};
pub use ring::{Ring, Shards, Tour, Travel, TravelNeed};
