//! Layers: each file holds one, forward and backward, with its equation, shapes and bytes.
//!
//! Shapes, for rank r of N: t tokens of the rank's slice, c input columns, o output columns, f
//! hidden columns, v classes; a subscript k marks the columns of shard k, about a 1/N of them.

mod attention;
mod combine;
mod dropout;
mod embedding;
mod head;
mod linear;
mod mlp;
mod norm;

pub use attention::{AttentionSpec, HEAD_DIM_MAX, SelfAttention};
pub use combine::{Residual, Seq};
pub use dropout::Dropout;
pub use embedding::{Embedding, EmbeddingRoute, IdSource, embed};
pub use head::{LmHead, Logits};
pub use linear::Linear;
pub use mlp::{Hidden, Mlp, MlpKind};
pub use norm::NormLayer;
