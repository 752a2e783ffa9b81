//! Moves shards between ranks.
//!
//! This crate knows bytes and ranks; it does not know layers. Read [`schedule`] first, then
//! [`Ring`], which is the rotation itself. [`Replicas`] and [`Gathering`] move what the strategies
//! that rotation is compared with move. [`Comm`] is one rank's end of a transport, and [`launch`]
//! starts the ranks.

mod comm;
mod error;
mod gathering;
pub mod launch;
mod operation;
mod parts;
mod replicas;
mod ring;
pub mod schedule;
mod transport;

pub use comm::{Comm, Hop, HopMode, Lane, Message, MessageKind, Tag, Traffic};
pub use error::{Collective, Error, Place, Result, Subject};
pub use gathering::{Gather, Gathering, Spares};
pub use parts::Parts;
pub use replicas::{Bucket, Replicas};
pub use ring::{Ring, Shards, Tour, Travel, TravelNeed};
