//! A model of your own out of rotated layers: a small Llama (RMS norm, rotary positions, grouped
//! queries, gated MLP) on four ranks. You write structure; memory, rotation and backward follow.
//!
//!     cargo run --release -p rotifer --example custom_model

use std::time::Duration;

use rotifer::Error;
use rotifer::layers::{
    AttentionSpec, Embedding, IdSource, Linear, LmHead, Mlp, MlpKind, NormLayer, Residual,
    SelfAttention, Seq,
};
use rotifer::models::Decoder;
use rotifer::optim::{LrSchedule, Optimizer};
use rotifer::strategy::Strategy;
use rotifer::train::{Source, TrainOptions, Trainer};
use rotifer_device::{Activation, CpuDevice, Norm, Purpose};
use rotifer_ring::launch;

const VOCAB: usize = 101;

fn model() -> Decoder {
    // 6 query heads share 2 key/value heads; none of these numbers divides by 4 ranks.
    let (width, heads, kv_heads, head_dim, mlp_width) = (90, 6, 2, 16, 250);
    let norm = |name: &str| NormLayer::new(name, width, Norm::Rms { eps: 1e-6 });
    let mut body = Seq::new();
    for i in 0..3 {
        let name = |part: &str| format!("model.layers.{i}.{part}");
        let qkv = Linear::new(&name("qkv"), width, (heads + 2 * kv_heads) * head_dim);
        let out = Linear::new(&name("o_proj"), heads * head_dim, width);
        let spec = AttentionSpec { heads, kv_heads, head_dim, rotary_theta: Some(10_000.0) };
        let attention =
            SelfAttention::new(&name("attn"), spec, qkv.without_bias(), out.without_bias());
        let mlp = Mlp::new(&name("mlp"), width, mlp_width, MlpKind::Gated(Activation::Silu));
        body = body
            .then(Residual::new(Seq::new().then(norm(&name("input_norm"))).then(attention)))
            .then(Residual::new(Seq::new().then(norm(&name("post_norm"))).then(mlp.driven())));
    }
    let tokens = Embedding::new("model.embed_tokens", VOCAB, width, 0.02, IdSource::Tokens);
    let head = LmHead::new("lm_head", VOCAB, width, 0.02);
    Decoder::new(vec![tokens], body, norm("model.norm"), head)
}

/// Rows that count upwards in steps of their own: predictable after two tokens.
struct Counting;

impl Source for Counting {
    fn num_targets(&self, _row: u64) -> usize {
        32
    }

    fn fill(&self, row: u64, inputs: &mut [i32], targets: &mut [i32], _: Option<&mut [i32]>) {
        let token = |i: usize| ((row * 13 + (row % 5 + 1) * i as u64) % VOCAB as u64) as i32;
        for i in 0..inputs.len() {
            (inputs[i], targets[i]) = (token(i), token(i + 1));
        }
    }
}

fn main() {
    let train = TrainOptions {
        strategy: Strategy::Rtp,
        reshard_after_forward: true,
        batch: 10,
        accumulation: 1,
        seq: 32,
        seed: 1,
        clip_norm: Some(1.0),
        optimizer: Optimizer::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 },
        schedule: LrSchedule::constant(3e-3),
        overlap: true,
        travel_bytes_max: 4 << 20,
        documents: false,
        logits_rows: 0,
        verify_replicated: false,
        train: true,
    };
    let deadline = Duration::from_secs(30);
    for ranks in [1, 4] {
        let options = launch::Options { deadline, ..launch::Options::new(ranks) };
        let results = launch::threads(&options, |comm| {
            CpuDevice::run(1, |dev| {
                let mut trainer = Trainer::new(dev, comm, model(), train.clone())?;
                let mut losses = Vec::new();
                for step in 0..60 {
                    losses.push(trainer.step(&Counting, step * 10, false)?.loss);
                }
                Ok::<_, Error>((losses, *trainer.plan()))
            })?
        });
        let (losses, plan) = &results.expect("the example trains")[0];
        print!("{ranks} rank(s): loss {:.3} -> {:.3}; bytes per rank:", losses[0], losses[59]);
        for purpose in Purpose::ALL {
            print!(" {} {}", purpose.name(), plan.bytes(purpose));
        }
        println!("; in all {}", plan.total());
    }
}
