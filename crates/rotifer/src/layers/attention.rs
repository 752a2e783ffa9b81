//! Self-attention between two rotated linear layers.

use rotifer_device::{Attention, Dtype, Mat, Region, Rotary, Write};

use super::linear::Linear;
use crate::build::Builder;
use crate::error::{Error, Result};
use crate::layer::{Context, Layer};
use crate::strategy::{Driven, Strategy};

/// Heads of a self-attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec {
    /// h: query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// d: channels per head, at most 256.
    pub head_dim: usize,
    /// Base of the rotary embedding, if positions enter here.
    pub rotary_theta: Option<f32>,
}

/// Most channels of a head: what the attention kernels have room for.
pub const HEAD_DIM_MAX: usize = 256;

/// `y = out(attention(qkv(x)))`, causal. x, y: `[t, c]`; the projection `[t, (h + 2k) d]` is cut
/// along its columns wherever that falls, also within a head: in the end a rank sees all columns of
/// its own slice, so neither heads nor key/value heads need divide by N. Attention itself is local.
/// The projection back is cut along the heads' columns. Only under tensor parallelism is a rank
/// left with whole heads of its own, h/N and k/N, which must be whole numbers.
///
/// Bytes: the weights of two [`Linear`]s; saves t ((2h + 2k) d + h): q, k, v, the heads' outputs
/// and one number per query and head; scratch for dq, dk, dv.
///
/// Source: paper section 3.1; `torch.nn.functional.scaled_dot_product_attention(is_causal=True)`.
#[derive(Debug)]
pub struct SelfAttention {
    name: String,
    spec: AttentionSpec,
    /// The heads that this rank works on.
    local: AttentionSpec,
    qkv: Driven<Linear>,
    out: Driven<Linear>,
    qkv_kept: Region,
    heads_kept: Region,
    lse_kept: Region,
    dqkv: Region,
    dheads: Region,
    delta: Region,
}

impl SelfAttention {
    /// Attention between the projections `qkv` and `out`.
    #[must_use]
    pub fn new(name: &str, spec: AttentionSpec, qkv: Linear, out: Linear) -> SelfAttention {
        let none = Region::empty(Dtype::F32);
        let AttentionSpec { heads, kv_heads, head_dim, .. } = spec;
        let blocks = [heads, kv_heads, kv_heads].map(|heads| heads * head_dim);
        SelfAttention {
            name: name.into(),
            spec,
            local: spec,
            qkv: qkv.first_of_pair(blocks.into()).driven(),
            out: out.second_of_pair().driven(),
            qkv_kept: none,
            heads_kept: none,
            lse_kept: none,
            dqkv: none,
            dheads: none,
            delta: none,
        }
    }

    /// The heads of this rank: all, except under tensor parallelism.
    fn local_heads(&self, b: &Builder<'_>) -> Result<AttentionSpec> {
        let (AttentionSpec { heads, kv_heads, .. }, world) = (self.spec, b.world());
        if b.strategy() != Strategy::Tp {
            return Ok(self.spec);
        }
        if heads % world != 0 || kv_heads % world != 0 {
            let layer = self.name.clone();
            return Err(Error::HeadsDoNotDivide { layer, heads, kv_heads, world });
        }
        Ok(AttentionSpec { heads: heads / world, kv_heads: kv_heads / world, ..self.spec })
    }

    const fn heads_width(&self) -> usize {
        self.local.heads * self.local.head_dim
    }

    fn shape(&self, cx: &Context<'_>) -> Attention {
        let AttentionSpec { heads, kv_heads, head_dim, .. } = self.local;
        Attention {
            batch: cx.rows(),
            seq: cx.batch.seq,
            heads,
            kv_heads,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            documents: cx.batch.documents.map(|d| d.first(cx.tokens())),
            lengths: None,
        }
    }

    /// Turns queries and keys, which lie side by side, by their positions.
    fn rotate(&self, cx: &Context<'_>, qkv: Region, inverse: bool) {
        let AttentionSpec { heads, kv_heads, head_dim, rotary_theta } = self.local;
        if let Some(theta) = rotary_theta {
            let rotary = Rotary { heads: heads + kv_heads, head_dim, theta, inverse };
            let positions = cx.batch.positions.first(cx.tokens());
            cx.dev.rotary(
                &rotary,
                positions,
                Mat::new(qkv, cx.tokens(), self.shape(cx).qkv_width()),
            );
        }
    }
}

impl Layer for SelfAttention {
    fn width_out(&self, width_in: usize) -> usize {
        self.out.width_out(self.qkv.width_out(width_in))
    }

    fn build(&mut self, b: &mut Builder<'_>, width_in: usize) -> Result<()> {
        let AttentionSpec { heads, kv_heads, head_dim, rotary_theta } = self.spec;
        let qkv_width = (heads + 2 * kv_heads) * head_dim;
        let projected = self.qkv.width_out(width_in);
        let odd = rotary_theta.is_some() && head_dim % 2 == 1;
        let wide = head_dim > HEAD_DIM_MAX;
        if kv_heads == 0 || heads % kv_heads != 0 || projected != qkv_width || odd || wide {
            return Err(Error::Shape {
                what: format!(
                    "attention {}: {heads} query heads must be a multiple of {kv_heads} key/value \
                     heads, the {head_dim} channels of a head at most {HEAD_DIM_MAX} (and even, if \
                     rotary), and the projection's \
                     {projected} columns equal (heads + 2 kv_heads) x head_dim = {qkv_width}",
                    self.name
                ),
            });
        }
        self.local = self.local_heads(b)?;
        let AttentionSpec { heads: local, kv_heads: local_kv, .. } = self.local;
        let qkv_local = (local + 2 * local_kv) * head_dim;
        let t = b.tokens_max();
        self.qkv_kept = b.kept(Dtype::F32, t * qkv_local);
        self.heads_kept = b.kept(Dtype::F32, t * self.heads_width());
        self.lse_kept = b.kept(Dtype::F32, t * local);
        if b.options().train {
            self.dqkv = b.scratch(Dtype::F32, t * qkv_local);
            self.dheads = b.scratch(Dtype::F32, t * self.heads_width());
            self.delta = b.scratch(Dtype::F32, t * local);
        }
        b.scope(|b| self.qkv.build(b, width_in))?;
        b.scope(|b| self.out.build(b, heads * head_dim))
    }

    fn forward(&self, cx: &Context<'_>, x: Region, y: Region, write: Write) -> Result<()> {
        let (t, shape) = (cx.tokens(), self.shape(cx));
        let qkv = self.qkv_kept.first(t * shape.qkv_width());
        let heads = self.heads_kept.first(t * self.heads_width());
        self.qkv.forward(cx, x, qkv, Write::Set)?;
        self.rotate(cx, qkv, false);
        cx.dev.attention(&shape, qkv, heads, self.lse_kept.first(t * shape.heads));
        self.out.forward(cx, heads, y, write)
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        x: Region,
        dy: Region,
        dx: Region,
        write: Write,
    ) -> Result<()> {
        let (t, shape) = (cx.tokens(), self.shape(cx));
        let [qkv, dqkv] = [self.qkv_kept, self.dqkv].map(|r| r.first(t * shape.qkv_width()));
        let [heads, dheads] =
            [self.heads_kept, self.dheads].map(|r| r.first(t * self.heads_width()));
        let [lse, delta] = [self.lse_kept, self.delta].map(|r| r.first(t * shape.heads));
        self.out.backward(cx, heads, dy, dheads, Write::Set)?;
        cx.dev.attention_backward(&shape, qkv, heads, lse, dheads, dqkv, delta);
        self.rotate(cx, dqkv, true);
        self.qkv.backward(cx, x, dqkv, dx, write)
    }
}
