//! Sampling on N ranks.

use crate::error::{Error, Result};
use crate::hash::mix;
use crate::models::Model;
use crate::train::Trainer;

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Most tokens to add to a prompt.
    pub tokens: usize,
    /// Divides the logits; 0 takes the most likely token (greedy).
    pub temperature: f32,
    /// Chooses among the most likely tokens that together have this probability (nucleus sampling;
    /// Holtzman et al. 2019); 1 among all.
    pub top_p: f32,
    /// Seed of the choices.
    pub seed: u64,
    /// Token that ends a text.
    pub end_of_text: Option<i32>,
}

impl Sampling {
    /// Checks the numbers.
    ///
    /// # Errors
    /// If the temperature is negative or not finite, or `top_p` is not in (0, 1].
    pub fn check(&self) -> Result<()> {
        let what = if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            format!("temperature {} must be 0 (greedy) or more", self.temperature)
        } else if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            format!("top_p {} must be above 0 and at most 1", self.top_p)
        } else {
            return Ok(());
        };
        Err(Error::Shape { what })
    }

    /// The token chosen from `logits`, for the token at `position` of row `row`: a function of
    /// these and the seed, so it is the same on any number of ranks.
    #[must_use]
    pub fn choose(&self, logits: &[f32], row: u64, position: u64) -> i32 {
        let best = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
        let greedy = (0..logits.len()).fold(0, best);
        if self.temperature == 0.0 {
            return greedy as i32;
        }
        let max = f64::from(logits[greedy]);
        let weight = |l: f32| ((f64::from(l) - max) / f64::from(self.temperature)).exp();
        let mut ranked: Vec<(f64, usize)> =
            logits.iter().enumerate().map(|(i, &l)| (weight(l), i)).collect();
        // Ties by token, so that the order is a function of the logits.
        ranked.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let total: f64 = ranked.iter().map(|(w, _)| w).sum();
        let mut nucleus = 0.0;
        let mut kept = 0;
        while kept < ranked.len() && (kept == 0 || nucleus < f64::from(self.top_p) * total) {
            nucleus += ranked[kept].0;
            kept += 1;
        }
        let bits = mix(mix(self.seed) ^ mix(row).rotate_left(1) ^ mix(position).rotate_left(2));
        let mut left = (bits >> 11) as f64 / (1u64 << 53) as f64 * nucleus;
        for (w, i) in &ranked[..kept] {
            left -= w;
            if left < 0.0 {
                return *i as i32;
            }
        }
        ranked[kept - 1].1 as i32
    }
}

/// Continues every prompt. Each rank works on its slice of the prompts and learns the tokens of
/// all: `on_token(row, token)` is called on every rank, in the same order. A text longer than the
/// context goes on from its last `seq` tokens. Returns the prompts with what was added.
///
/// # Errors
/// If a prompt is empty or has an unknown token, there are more prompts than the trainer was built
/// for, the sampling is out of range, or a rank fails.
pub fn generate<M: Model>(
    trainer: &mut Trainer<'_, M>,
    prompts: &[Vec<i32>],
    sampling: &Sampling,
    mut on_token: impl FnMut(usize, i32),
) -> Result<Vec<Vec<i32>>> {
    sampling.check()?;
    check_prompts(trainer, prompts)?;
    let rank = trainer.comm().rank();
    let (seq, classes) = (trainer.options().seq, trainer.classes());
    let mine = trainer.prompts_of_rank(prompts.len());
    // Where all ranks see all prompts, they choose alike, and one says so.
    let says = rank == 0 || !trainer.shares_batch();
    let mut texts = prompts.to_vec();
    let mut done = vec![false; prompts.len()];
    let mut logits = Vec::new();
    for _ in 0..sampling.tokens {
        let tails: Vec<&[i32]> = texts.iter().map(|t| &t[t.len().saturating_sub(seq)..]).collect();
        trainer.logits(&tails, &mut logits)?;
        let mut chosen = vec![0.0; prompts.len()];
        let own = mine.clone().zip(logits.chunks_exact(classes.max(1)));
        for (row, logits) in own.filter(|_| says) {
            let token = sampling.choose(logits, row as u64, texts[row].len() as u64);
            chosen[row] = f64::from(token);
        }
        trainer.sum_over_ranks(&mut chosen)?;
        for (row, token) in chosen.iter().enumerate() {
            let token = *token as i32;
            if !done[row] && Some(token) == sampling.end_of_text {
                done[row] = true;
            }
            if !done[row] {
                texts[row].push(token);
                on_token(row, token);
            }
        }
        if done.iter().all(|d| *d) {
            break;
        }
    }
    Ok(texts)
}

fn check_prompts<M: Model>(trainer: &Trainer<'_, M>, prompts: &[Vec<i32>]) -> Result<()> {
    let most = trainer.prompts_max();
    let classes = trainer.classes();
    let unknown = prompts.iter().flatten().find(|t| !(0..classes as i64).contains(&i64::from(**t)));
    let what = if prompts.is_empty() {
        "there is no prompt to continue".into()
    } else if prompts.len() > most {
        format!("{} prompts are more than the {most} that the model was built for", prompts.len())
    } else if prompts.iter().any(Vec::is_empty) {
        "a prompt must have at least one token".into()
    } else if let Some(token) = unknown {
        format!("token {token} of a prompt is not below the model's {classes} classes")
    } else {
        return Ok(());
    };
    Err(Error::Shape { what })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(temperature: f32, top_p: f32) -> Sampling {
        Sampling { tokens: 1, temperature, top_p, seed: 7, end_of_text: None }
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        assert_eq!(sampling(0.0, 1.0).choose(&[0.0, 3.0, 3.0, -1.0], 0, 0), 1);
    }

    #[test]
    fn a_small_nucleus_holds_only_the_most_likely_token() {
        let logits = [0.0, 2.0, 1.0];
        assert!((0..200).all(|p| sampling(1.0, 0.5).choose(&logits, 0, p) == 1));
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [0.0, 1.0, 2.0];
        let mut counts = [0.0; 3];
        for position in 0..20_000 {
            counts[sampling(1.0, 1.0).choose(&logits, 3, position) as usize] += 1.0 / 20_000.0;
        }
        let total: f64 = logits.iter().map(|l: &f32| f64::from(*l).exp()).sum();
        for (count, logit) in counts.iter().zip(logits) {
            // Five standard deviations of a mean of 20,000 draws are below 0.018.
            assert!((count - f64::from(logit).exp() / total).abs() < 0.018);
        }
    }
}
