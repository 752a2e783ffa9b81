//! The `config.json` of Hugging Face's GPT-2.

use std::path::Path;

use rotifer_device::Activation;
use serde::{Deserialize, Serialize};

use super::gpt2::{Gpt2, LAYER_NORM_EPS};
use crate::checkpoint::{CONFIG, weights_bytes};
use crate::error::{Error, Result};
use crate::layers::{EmbeddingRoute, Hidden, Logits};

/// `config.json` of a `GPT2LMHeadModel`, as far as the model is concerned. Other fields of a file
/// are ignored, as `transformers` does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names are Hugging Face's, documented with GPT2Config")]
pub struct HfConfig {
    pub model_type: String,
    #[serde(default)]
    pub architectures: Vec<String>,
    pub vocab_size: usize,
    pub n_positions: usize,
    pub n_embd: usize,
    pub n_layer: usize,
    pub n_head: usize,
    #[serde(default)]
    pub n_inner: Option<usize>,
    #[serde(default = "gelu_new")]
    pub activation_function: String,
    #[serde(default)]
    pub resid_pdrop: f32,
    #[serde(default)]
    pub embd_pdrop: f32,
    #[serde(default)]
    pub attn_pdrop: f32,
    #[serde(default = "eps")]
    pub layer_norm_epsilon: f64,
    #[serde(default = "std")]
    pub initializer_range: f32,
    #[serde(default = "yes")]
    pub tie_word_embeddings: bool,
    #[serde(default = "yes")]
    pub scale_attn_weights: bool,
    #[serde(default)]
    pub scale_attn_by_inverse_layer_idx: bool,
    #[serde(default)]
    pub add_cross_attention: bool,
    #[serde(default)]
    pub bos_token_id: Option<u32>,
    #[serde(default)]
    pub eos_token_id: Option<u32>,
    /// Which tokenizer the model was trained with, where `tokenizer.json` cannot say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rotifer_tokenizer: Option<String>,
}

fn gelu_new() -> String {
    "gelu_new".into()
}

fn eps() -> f64 {
    // As written: 1e-5, not the nearest f32 of it.
    1e-5
}

const fn std() -> f32 {
    0.02
}

const fn yes() -> bool {
    true
}

impl HfConfig {
    /// The file for a model; `end_of_text` is the tokenizer's.
    #[must_use]
    pub fn of(model: &Gpt2, tokenizer: Option<&str>, end_of_text: Option<u32>) -> HfConfig {
        let activation = match model.activation {
            Activation::GeluTanh => "gelu_new",
            Activation::GeluErf => "gelu",
            Activation::Silu => "silu",
        };
        HfConfig {
            model_type: "gpt2".into(),
            architectures: vec!["GPT2LMHeadModel".into()],
            vocab_size: model.vocab_size,
            n_positions: model.context,
            n_embd: model.width,
            n_layer: model.layers,
            n_head: model.heads,
            n_inner: Some(model.mlp_width),
            activation_function: activation.into(),
            resid_pdrop: model.dropout,
            embd_pdrop: model.dropout,
            attn_pdrop: 0.0,
            layer_norm_epsilon: eps(),
            initializer_range: model.init_std,
            tie_word_embeddings: model.tied,
            scale_attn_weights: true,
            scale_attn_by_inverse_layer_idx: false,
            add_cross_attention: false,
            bos_token_id: end_of_text,
            eos_token_id: end_of_text,
            rotifer_tokenizer: tokenizer.map(Into::into),
        }
    }

    /// The content of `config.json`.
    #[must_use]
    pub fn text(&self) -> String {
        serde_json::to_string_pretty(self).expect("a plain struct is always JSON") + "\n"
    }

    /// Writes `config.json` into a folder that exists.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(CONFIG);
        std::fs::write(&path, self.text()).map_err(|source| Error::Io {
            action: "write",
            path,
            source,
        })
    }

    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read or is no `config.json` of a GPT-2.
    pub fn read(path: &Path) -> Result<HfConfig> {
        let text = std::fs::read_to_string(path).map_err(|source| Error::Io {
            action: "read",
            path: path.into(),
            source,
        })?;
        let bad = |what: String| Error::Checkpoint { path: path.into(), what };
        let config: HfConfig = serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
        if config.model_type != "gpt2" {
            let what = format!("model_type is {:?}; only \"gpt2\" can be read", config.model_type);
            return Err(bad(what));
        }
        Ok(config)
    }

    /// Refuses a folder whose weights are fewer bytes than the matrices that the file describes,
    /// before memory is taken for them: sizes in a description cost nothing to write.
    ///
    /// # Errors
    /// If the weights are missing or too few, or a size is 0.
    pub fn require_weights(&self, folder: &Path) -> Result<()> {
        let (path, bytes) = weights_bytes(folder)?;
        let bytes = bytes as f64;
        let mlp_width = self.n_inner.unwrap_or(self.n_embd.saturating_mul(4));
        let sizes = [self.vocab_size, self.n_positions, self.n_embd, self.n_layer, mlp_width];
        // Floats, as a product of sizes need not fit an integer.
        let [v, p, c, l, f] = sizes.map(|n| n as f64);
        let least = 4.0 * ((v + p) * c + l * (4.0 * c * c + 2.0 * c * f));
        let what = if sizes.contains(&0) {
            format!("belongs to a {CONFIG} with a size of 0")
        } else if least > bytes {
            format!(
                "has {bytes} bytes, but the sizes in {CONFIG} need at least {least}: the file is \
                 cut short or belongs to another model"
            )
        } else {
            return Ok(());
        };
        Err(Error::Checkpoint { path, what })
    }

    /// The model that the file describes, for evaluation or sampling.
    ///
    /// # Errors
    /// If it has an activation or sizes that the model cannot have; `path` is named.
    pub fn model(&self, path: &Path) -> Result<Gpt2> {
        let bad = |what: String| Error::Checkpoint { path: path.into(), what };
        let activation = match self.activation_function.as_str() {
            "gelu_new" | "gelu_pytorch_tanh" => Activation::GeluTanh,
            "gelu" => Activation::GeluErf,
            "silu" => Activation::Silu,
            other => {
                let known = "gelu_new, gelu_pytorch_tanh, gelu, silu";
                return Err(bad(format!("activation_function {other:?} is none of {known}")));
            }
        };
        if self.n_head == 0 || !self.n_embd.is_multiple_of(self.n_head) {
            let (embd, head) = (self.n_embd, self.n_head);
            return Err(bad(format!("n_embd ({embd}) is no multiple of n_head ({head})")));
        }
        for (key, found, built) in [
            ("layer_norm_epsilon", self.layer_norm_epsilon, LAYER_NORM_EPS.into()),
            ("scale_attn_weights", f64::from(self.scale_attn_weights), 1.0),
            (
                "scale_attn_by_inverse_layer_idx",
                f64::from(self.scale_attn_by_inverse_layer_idx),
                0.0,
            ),
            ("add_cross_attention", f64::from(self.add_cross_attention), 0.0),
        ] {
            // An f32 in the model, whose nearest value is meant.
            if (found - built).abs() > 1e-9 {
                return Err(bad(format!("{key} is {found}; only {built} is built")));
            }
        }
        Ok(Gpt2 {
            vocab_size: self.vocab_size,
            context: self.n_positions,
            width: self.n_embd,
            layers: self.n_layer,
            heads: self.n_head,
            mlp_width: self.n_inner.unwrap_or(4 * self.n_embd),
            activation,
            tied: self.tie_word_embeddings,
            // There is none outside of training.
            dropout: 0.0,
            mlp_hidden: Hidden::Recomputed,
            logits: Logits::Recomputed,
            embedding: EmbeddingRoute::Fewest,
            init_std: self.initializer_range,
        })
    }
}
