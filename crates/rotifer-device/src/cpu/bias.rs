//! Adding a row to every token, and the sum over tokens that is its backward.

use super::simd::map;
use super::team::{Team, part};
use super::view::{Rows, Span};

/// Tokens whose sum is made before it is added to what they have in common: bounds the length of a
/// chain of additions, and lets one pass over these tokens serve two kernels while they are cached.
pub(super) const TOKENS: usize = 64;
/// Channels of one task of a sum over tokens: wide enough to stream, and in registers or nearly.
pub(super) const CHANNELS: usize = 128;

/// `y[i, :] = b` or `+= b`.
pub(super) fn bias(team: Team, b: Span<f32>, y: Rows, add: bool) {
    let per = Team::rows_per_task(y.cols);
    team.each(
        y.rows.div_ceil(per),
        #[inline(always)]
        |i| {
            for row in part(i, per, y.rows) {
                let (b, y_row) = (b.ptr().cast_const(), y.ptr(row));
                // SAFETY: a row of y, which no other task touches; b has as many elements.
                unsafe {
                    if add {
                        map(
                            y.cols,
                            [b, y_row],
                            [y_row],
                            #[inline(always)]
                            |_, [b, y]| [y + b],
                        );
                    } else {
                        y_row.copy_from_nonoverlapping(b, y.cols);
                    }
                }
            }
        },
    );
}

/// `db += sum over i of dy[i, :]`.
pub(super) fn backward(team: Team, dy: Rows, db: Span<f32>) {
    let tokens = dy.rows.div_ceil(TOKENS);
    let channels = dy.cols.div_ceil(CHANNELS);
    over_blocks(
        team,
        tokens,
        channels,
        #[inline(always)]
        |token, channel| {
            let channel = part(channel, CHANNELS, dy.cols);
            let mut sums = [0.0_f32; CHANNELS];
            for i in part(token, TOKENS, dy.rows) {
                // SAFETY: dy is only read.
                let row = unsafe { &dy.row(i)[channel.clone()] };
                add_to(&mut sums, row);
            }
            // SAFETY: these channels are this task's own.
            add_to(unsafe { db.slice_mut(channel) }, &sums);
        },
    );
}

/// Calls `block(token block, channel block)` for all of them: those of one channel block one after
/// the other in the order of tokens, whatever the number of threads.
#[inline(always)]
pub(super) fn over_blocks(
    team: Team,
    tokens: usize,
    channels: usize,
    block: impl Fn(usize, usize) + Send + Sync,
) {
    if team.threads == 1 {
        // Tokens outside: memory is read in its own order.
        team.each(
            tokens,
            #[inline(always)]
            |token| {
                (0..channels).for_each(
                    #[inline(always)]
                    |channel| block(token, channel),
                )
            },
        );
    } else {
        team.each(
            channels,
            #[inline(always)]
            |channel| {
                (0..tokens).for_each(
                    #[inline(always)]
                    |token| block(token, channel),
                )
            },
        );
    }
}

/// `sums += row`, over the shorter of the two.
#[inline(always)]
pub(super) fn add_to(sums: &mut [f32], row: &[f32]) {
    for (sum, value) in sums.iter_mut().zip(row) {
        *sum += value;
    }
}
