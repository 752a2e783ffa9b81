//! Learning-rate schedules.

use std::f64::consts::PI;

/// How the learning rate goes on after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// It stays at the peak.
    Constant,
    /// A straight line down to the final rate.
    Linear,
    /// Half a cosine down to the final rate (Loshchilov and Hutter 2017, without restarts).
    Cosine,
    /// It stays at the peak, then falls in a straight line over the last steps: warmup-stable-decay
    /// (Hu et al. 2024, Haegele et al. 2024). A run may be prolonged from any stable step.
    WarmupStableDecay {
        /// Number of steps of the fall.
        decay_steps: u64,
    },
}

/// The learning rate as a function of the step, so that a resumed run needs no state of it.
///
/// ```
/// use rotifer::optim::{LrSchedule, Shape};
/// let s = LrSchedule {
///     peak: 1e-3, warmup_steps: 10, steps: 110, final_ratio: 0.1, shape: Shape::Cosine,
/// };
/// assert_eq!(s.lr(0), 1e-4);
/// assert_eq!(s.lr(9), 1e-3);
/// assert!((s.lr(60) - 5.5e-4).abs() < 1e-12);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LrSchedule {
    /// Highest rate.
    pub peak: f64,
    /// Number of steps of the warm-up; 0 for none.
    pub warmup_steps: u64,
    /// Number of steps of the run: where a falling rate ends.
    pub steps: u64,
    /// The final rate as a fraction of the peak. A constant rate does not read it.
    pub final_ratio: f64,
    /// How it goes on after the warm-up.
    pub shape: Shape,
}

impl LrSchedule {
    /// The same rate at every step.
    #[must_use]
    pub const fn constant(lr: f64) -> LrSchedule {
        LrSchedule { peak: lr, warmup_steps: 0, steps: 0, final_ratio: 1.0, shape: Shape::Constant }
    }

    /// The rate of step `step`, from 0.
    ///
    /// Warm-up, `step < warmup_steps`: `peak * (step + 1) / warmup_steps`, so that the first step
    /// already learns and the last one is at the peak. Afterwards, with `f = final_ratio * peak`
    /// and p the part of the fall that is done:
    ///  - constant: `peak`;
    ///  - linear: `peak + (f - peak) p`, cosine: `f + (peak - f) (1 + cos(pi p)) / 2`, both with
    ///    `p = (step - warmup_steps) / (steps - warmup_steps)`;
    ///  - warmup-stable-decay: linear, with `p = (step - start) / decay_steps` from
    ///    `start = steps - decay_steps` on, but not before the warm-up is over; before that `peak`.
    ///
    /// As in nanoGPT and transformers, the fall ends at `steps`: the last step of the run is one
    /// increment above the final rate, and whatever follows it stays at the final rate.
    #[must_use]
    pub fn lr(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.peak * ((step + 1) as f64 / self.warmup_steps as f64);
        }
        let low = self.peak * self.final_ratio;
        let fall = |start: u64| {
            if step < start {
                0.0
            } else if step >= self.steps {
                1.0
            } else {
                (step - start) as f64 / (self.steps - start) as f64
            }
        };
        match self.shape {
            Shape::Constant => self.peak,
            Shape::Linear => self.peak + (low - self.peak) * fall(self.warmup_steps),
            Shape::Cosine => {
                low + (self.peak - low) * 0.5 * (1.0 + (PI * fall(self.warmup_steps)).cos())
            }
            Shape::WarmupStableDecay { decay_steps } => {
                let start = self.steps.saturating_sub(decay_steps).max(self.warmup_steps);
                self.peak + (low - self.peak) * fall(start)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 4 steps of warm-up, 12 in all, from 0.8 down to 0.08.
    fn schedule(shape: Shape) -> LrSchedule {
        LrSchedule { peak: 0.8, warmup_steps: 4, steps: 12, final_ratio: 0.1, shape }
    }

    /// Tolerance: a handful of roundings of numbers below 1.
    fn check(shape: Shape, expected: &[(u64, f64)]) {
        for &(step, lr) in expected {
            let got = schedule(shape).lr(step);
            assert!((got - lr).abs() < 1e-15, "{shape:?}, step {step}: {got} is not {lr}");
        }
    }

    #[test]
    fn every_shape_warms_up_to_the_peak() {
        let wsd = Shape::WarmupStableDecay { decay_steps: 4 };
        for shape in [Shape::Constant, Shape::Linear, Shape::Cosine, wsd] {
            check(shape, &[(0, 0.2), (1, 0.4), (2, 0.6), (3, 0.8), (4, 0.8)]);
        }
    }

    #[test]
    fn constant_never_falls() {
        check(Shape::Constant, &[(5, 0.8), (11, 0.8), (1000, 0.8)]);
        let s = LrSchedule::constant(3e-3);
        assert_eq!([s.lr(0), s.lr(1), s.lr(u64::MAX)], [3e-3; 3]);
    }

    #[test]
    fn linear_falls_in_equal_increments_and_stays_low() {
        check(Shape::Linear, &[(5, 0.71), (8, 0.44), (11, 0.17), (12, 0.08), (99, 0.08)]);
    }

    #[test]
    fn cosine_passes_through_the_middle() {
        // p = 1/4 and 3/4 at steps 6 and 10: cos = +-sqrt(1/2).
        let off = 0.36 * 0.5f64.sqrt();
        let expected = [(6, 0.44 + off), (8, 0.44), (10, 0.44 - off), (12, 0.08), (99, 0.08)];
        check(Shape::Cosine, &expected);
    }

    #[test]
    fn warmup_stable_decay_falls_at_the_end_only() {
        let wsd = |decay_steps| Shape::WarmupStableDecay { decay_steps };
        check(wsd(4), &[(7, 0.8), (8, 0.8), (9, 0.62), (10, 0.44), (11, 0.26), (12, 0.08)]);
        // A fall that is longer than what the warm-up leaves starts after the warm-up.
        check(wsd(100), &[(3, 0.8), (4, 0.8), (8, 0.44), (12, 0.08)]);
        // No fall at all: the final rate is that of the steps after the run.
        check(wsd(0), &[(11, 0.8), (12, 0.08)]);
    }

    #[test]
    fn without_warm_up_the_first_step_is_at_the_peak() {
        let s = LrSchedule { warmup_steps: 0, ..schedule(Shape::Linear) };
        assert_eq!(s.lr(0), 0.8);
        assert!((s.lr(6) - 0.44).abs() < 1e-15);
    }
}
