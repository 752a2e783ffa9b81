//! GPT-2, any size.

use rotifer_device::{Activation, Norm};

use super::Decoder;
use crate::layers::{
    AttentionSpec, Dropout, Embedding, EmbeddingRoute, Hidden, IdSource, Linear, LmHead, Logits,
    Mlp, MlpKind, NormLayer, Residual, SelfAttention, Seq,
};
use crate::params::{Init, Layout};

/// Added to the variance in GPT-2's layer norms.
pub(super) const LAYER_NORM_EPS: f32 = 1e-5;

/// Sizes and options of a GPT-2.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpt2 {
    /// v: classes.
    pub vocab_size: usize,
    /// Positions that have an embedding.
    pub context: usize,
    /// c: width of the stream; a multiple of `heads`.
    pub width: usize,
    /// Blocks.
    pub layers: usize,
    /// Attention heads.
    pub heads: usize,
    /// f: hidden columns of an MLP.
    pub mlp_width: usize,
    /// Nonlinearity of the MLPs.
    pub activation: Activation,
    /// Whether the head uses the token embedding's table.
    pub tied: bool,
    /// Dropout of the embeddings and of each residual branch.
    pub dropout: f32,
    /// What becomes of the MLPs' hidden activations.
    pub mlp_hidden: Hidden,
    /// What becomes of the logits.
    pub logits: Logits,
    /// How embeddings meet their tokens.
    pub embedding: EmbeddingRoute,
    /// Standard deviation of initial weights; the projections back to the stream get this divided
    /// by the root of twice the number of layers.
    pub init_std: f32,
}

/// The model, with the parameter names and layouts of Hugging Face's `GPT2LMHeadModel`.
///
/// Source: Radford et al. 2019; `transformers` `modeling_gpt2`. Dropout of attention probabilities
/// is left out: flash attention has no such matrix.
#[must_use]
pub fn gpt2(spec: &Gpt2) -> Decoder {
    let Gpt2 { width, init_std: std, .. } = *spec;
    let eps = LAYER_NORM_EPS;
    let branch_std = std / (2.0 * spec.layers as f32).sqrt();
    let norm = |name: &str| NormLayer::new(name, width, Norm::Layer { eps });
    let conv = |name: &str, o, std| {
        let init = Init::Normal { std };
        Linear::new(name, width, o).layout(Layout::Transposed).init(init)
    };
    let drop =
        |seq: Seq| if spec.dropout > 0.0 { seq.then(Dropout::new(spec.dropout)) } else { seq };
    let heads = AttentionSpec {
        heads: spec.heads,
        kv_heads: spec.heads,
        head_dim: width / spec.heads,
        rotary_theta: None,
    };
    let mut body = Seq::new();
    if spec.dropout > 0.0 {
        body = body.then(Dropout::new(spec.dropout));
    }
    for i in 0..spec.layers {
        let h = format!("transformer.h.{i}");
        let attention = SelfAttention::new(
            &format!("{h}.attn"),
            heads,
            conv(&format!("{h}.attn.c_attn"), 3 * width, std),
            conv(&format!("{h}.attn.c_proj"), width, branch_std),
        );
        let kind = MlpKind::Plain(spec.activation);
        let mlp = Mlp::new(&format!("{h}.mlp"), width, spec.mlp_width, kind)
            .hidden(spec.mlp_hidden)
            .init_std(std, branch_std);
        let (ln_1, ln_2) = (norm(&format!("{h}.ln_1")), norm(&format!("{h}.ln_2")));
        body = body
            .then(Residual::new(drop(Seq::new().then(ln_1).then(attention))))
            .then(Residual::new(drop(Seq::new().then(ln_2).then(mlp.driven()))));
    }
    let table = |name, rows, ids| Embedding::new(name, rows, width, std, ids).route(spec.embedding);
    let tokens = table("transformer.wte", spec.vocab_size, IdSource::Tokens);
    let positions = table("transformer.wpe", spec.context, IdSource::Positions);
    let head = if spec.tied { "transformer.wte" } else { "lm_head" };
    let head = LmHead::new(head, spec.vocab_size, width, std).logits_are(spec.logits);
    Decoder::new(vec![tokens, positions], body, norm("transformer.ln_f"), head)
}
