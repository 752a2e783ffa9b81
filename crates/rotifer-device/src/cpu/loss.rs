//! Cross-entropy over classes that come in blocks: an online softmax per token.

use super::simd::{exp, max, sum_of};
use super::team::Team;
use super::view::{Rows, Span};

/// Logits that are read twice, for their maximum and for their sum, while they are in the
/// first-level cache.
const RUN: usize = 2048;

/// Position of a token's target within a block of classes.
#[inline(always)]
fn position(target: i32, first: usize, classes: usize) -> Option<usize> {
    let at = usize::try_from(target).ok()?.checked_sub(first)?;
    (at < classes).then_some(at)
}

/// Takes one block of classes into the state (running max, running sum, target's logit).
pub(super) fn block(team: Team, logits: Rows, first: usize, targets: Span<i32>, state: Span<f32>) {
    team.each(
        logits.rows,
        #[inline(always)]
        |i| {
            // SAFETY: logits and targets are only read; token i's state is this task's own.
            let (row, target, state) = unsafe {
                let state = state.slice_mut(3 * i..3 * i + 3);
                (logits.row(i), targets.slice(i..i + 1)[0], state)
            };
            let (mut top, mut sum) = (state[0], state[1]);
            for run in row.chunks(RUN) {
                let new_top = top.max(max(run));
                // While every logit is -inf the sum stays 0, and there is no max to subtract.
                if new_top > f32::NEG_INFINITY {
                    let here = sum_of(
                        run,
                        #[inline(always)]
                        |x| exp(x - new_top),
                    );
                    sum = sum.mul_add(exp(top - new_top), here);
                    top = new_top;
                }
            }
            (state[0], state[1]) = (top, sum);
            if let Some(at) = position(target, first, row.len()) {
                state[2] = row[at];
            }
        },
    );
}

/// Joins the states of two sets of classes. One thread: there are three numbers per token.
pub(super) fn join(other: Span<f32>, state: Span<f32>) {
    let len = state.len();
    // SAFETY: the device checked that the output is apart from the input.
    let (other, state) = unsafe { (other.slice(0..len), state.slice_mut(0..len)) };
    for (other, state) in other.as_chunks::<3>().0.iter().zip(state.as_chunks_mut::<3>().0) {
        let top = state[0].max(other[0]);
        // Of classes that are all -inf the sum is 0, and there is no max to subtract.
        if top > f32::NEG_INFINITY {
            state[1] = state[1] * exp(state[0] - top) + other[1] * exp(other[0] - top);
            state[0] = top;
        }
        state[2] += other[2];
    }
}

/// `lse = max + ln(sum)`, and the loss of all tokens with a target. One thread, in the order of
/// tokens: a logarithm per token is nothing beside the logits it took to get here.
pub(super) fn finish(state: Span<f32>, targets: Span<i32>, lse: Span<f32>, loss: Span<f64>) {
    let tokens = targets.len();
    // SAFETY: the device checked that outputs are apart from inputs and each other.
    let (state, targets, lse, loss) = unsafe {
        let (lse, loss) = (lse.slice_mut(0..tokens), loss.slice_mut(0..1));
        (state.slice(0..3 * tokens), targets.slice(0..tokens), lse, loss)
    };
    let mut sum = 0.0;
    for ((state, &target), lse) in state.as_chunks::<3>().0.iter().zip(targets).zip(lse) {
        let [top, exp_sum, logit] = *state;
        *lse = top + exp_sum.ln();
        if target >= 0 {
            sum += f64::from(*lse) - f64::from(logit);
        }
    }
    loss[0] += sum;
}

/// `logits = (softmax - onehot) scale`, in place; zero for tokens without a target.
pub(super) fn backward(
    team: Team,
    logits: Rows,
    first: usize,
    targets: Span<i32>,
    lse: Span<f32>,
    scale: f32,
) {
    team.each(
        logits.rows,
        #[inline(always)]
        |i| {
            // SAFETY: targets and lse are only read; row i is this task's own.
            let (row, target, lse) = unsafe {
                let lse = lse.slice(i..i + 1)[0];
                (logits.row_mut(i), targets.slice(i..i + 1)[0], lse)
            };
            if target < 0 {
                row.fill(0.0);
                return;
            }
            for x in row.iter_mut() {
                *x = exp(*x - lse) * scale;
            }
            if let Some(at) = position(target, first, row.len()) {
                row[at] -= scale;
            }
        },
    );
}
