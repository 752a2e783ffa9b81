//! A decoder of any body has the gradient of its loss, and refuses what it cannot be.

#![allow(missing_docs, reason = "test names are claims")]

mod common;

use common::{HAND_OVER, Tokens, on_ranks, options, try_on_ranks};
use rotifer::layers::{
    Dropout, Embedding, IdSource, LmHead, Mlp, MlpKind, NormLayer, Residual, Seq,
};
use rotifer::models::Decoder;
use rotifer::train::{Source, TrainOptions, Trainer};
use rotifer_device::{Activation, Norm};

const WIDTH: usize = 24;
const VOCAB: usize = 57;

fn mlp(name: &str) -> rotifer::strategy::Driven<Mlp> {
    let kind = MlpKind::Gated(Activation::Silu);
    Mlp::new(name, WIDTH, 40, kind).init_std(0.3, 0.3).driven()
}

fn norm(name: &str) -> NormLayer {
    NormLayer::new(name, WIDTH, Norm::Layer { eps: 1e-5 })
}

fn decoder(positions: usize, body: Seq) -> Decoder {
    let table = |name, rows, ids| Embedding::new(name, rows, WIDTH, 0.3, ids);
    let tokens = table("tokens", VOCAB, IdSource::Tokens);
    let positions = table("positions", positions, IdSource::Positions);
    let head = LmHead::new("tokens", VOCAB, WIDTH, 0.3);
    Decoder::new(vec![tokens, positions], body, norm("last"), head)
}

fn decoder_options() -> TrainOptions {
    TrainOptions { batch: 6, seq: 9, ..options() }
}

/// The derivative of the loss along a random direction of all weights; see `layers.rs` for the
/// tolerance. The loss is a mean, so its rounding is smaller, and so is its slope.
fn finite_differences(what: &str, ranks: usize, body: &(dyn Fn() -> Seq + Sync)) {
    const H: f64 = 1.0 / 64.0;
    let tokens = Tokens { vocab_size: VOCAB, seq: 9 };
    let slopes = on_ranks(ranks, HAND_OVER.mode, |comm, dev| {
        let mut trainer = Trainer::new(dev, comm, decoder(9, body()), decoder_options())?;
        trainer.accumulate(&tokens, 0, false)?;
        let first = trainer.comm().rank() == 0;
        let mut pieces = Vec::new();
        let mut by = 0.0;
        for param in trainer.params() {
            for piece in &param.pieces {
                // Of the global place, so that all ranks move along one direction.
                let start = piece.rows.start * param.width + param.name.len();
                let direction = |i: usize| (((start + i) * 7919) % 101) as f32 / 101.0 - 0.5;
                let direction: Vec<f32> = (0..piece.weights.len()).map(direction).collect();
                let mut weights = vec![0.0; direction.len()];
                let mut gradient = weights.clone();
                dev.read_f32(piece.weights, &mut weights);
                dev.read_f32(piece.gradients, &mut gradient);
                if first || !param.replicated {
                    let product = |(g, d): (&f32, &f32)| f64::from(*g) * f64::from(*d);
                    by += gradient.iter().zip(&direction).map(product).sum::<f64>();
                }
                pieces.push((piece.clone(), weights, direction));
            }
        }
        let mut loss = |h: f64| -> rotifer::Result<f64> {
            for (piece, weights, direction) in &pieces {
                let moved = weights.iter().zip(direction).map(|(w, d)| w + h as f32 * d);
                dev.write_f32(&moved.collect::<Vec<_>>(), piece.weights);
            }
            Ok(trainer.accumulate(&tokens, 0, false)?.loss)
        };
        let mut central =
            |h: f64| -> rotifer::Result<f64> { Ok((loss(h)? - loss(-h)?) / (2.0 * h)) };
        let slope = (4.0 * central(H / 2.0)? - central(H)?) / 3.0;
        Ok((slope, by))
    });
    let by: f64 = slopes.iter().map(|(_, by)| by).sum();
    let slope = slopes[0].0;
    assert!((slope - by).abs() < 2e-3 * slope.abs().max(0.1), "{what}: {by} instead of {slope}");
}

#[test]
fn gradients_are_those_of_the_loss_whatever_the_body() {
    for ranks in [1, 3] {
        finite_differences("a body that is not residual", ranks, &|| Seq::new().then(mlp("m")));
        finite_differences("a residual body", ranks, &|| {
            let residual = |n: &str, m: &str| Residual::new(Seq::new().then(norm(n)).then(mlp(m)));
            Seq::new().then(residual("n1", "m1")).then(residual("n2", "m2"))
        });
        finite_differences("dropout first", ranks, &|| {
            let residual = Residual::new(Seq::new().then(norm("n")).then(mlp("m")));
            Seq::new().then(Dropout::new(0.3)).then(residual)
        });
    }
}

fn refusal(options: &TrainOptions, positions: usize, source: &(dyn Source + Sync)) -> String {
    let failed = try_on_ranks(1, HAND_OVER.mode, |comm, dev| {
        let model = decoder(positions, Seq::new().then(mlp("m")));
        Trainer::new(dev, comm, model, options.clone())?.step(source, 0, false)
    });
    failed.expect_err("refused").to_string()
}

/// Rows with one token out of range.
struct Strange {
    input: i32,
    target: i32,
}

impl Source for Strange {
    fn num_targets(&self, _row: u64) -> usize {
        9
    }

    fn fill(&self, _row: u64, inputs: &mut [i32], targets: &mut [i32], _: Option<&mut [i32]>) {
        inputs.fill(1);
        targets.fill(2);
        (inputs[3], targets[4]) = (self.input, self.target);
    }
}

#[test]
fn tokens_and_positions_out_of_range_are_refused() {
    let options = decoder_options();
    let tokens = Tokens { vocab_size: VOCAB, seq: 9 };
    let text = refusal(&options, 8, &tokens);
    assert!(text.contains("rows of 9 tokens need as many position embeddings, not 8"), "{text}");
    for (input, target) in [(57, 2), (-1, 2), (1, 57)] {
        let text = refusal(&options, 9, &Strange { input, target });
        assert!(text.contains("not below the model's 57 classes"), "{text}");
    }
    let text = refusal(&TrainOptions { logits_rows: 7, ..options }, 9, &tokens);
    assert!(text.contains("logits of 7 rows"), "{text}");
}
