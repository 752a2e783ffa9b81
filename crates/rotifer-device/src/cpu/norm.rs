//! Layer and root-mean-square normalisation over the channels of each token.

use super::bias::{CHANNELS, TOKENS, add_to, over_blocks};
use super::simd::{LANES, map, sum, sum_of};
use super::team::{Team, part};
use super::view::{Rows, Span};
use crate::Norm;

/// Operands of the backward pass.
#[derive(Clone, Copy)]
pub(super) struct Backward {
    pub(super) x: Rows,
    pub(super) w: Span<f32>,
    pub(super) stats: Span<f32>,
    pub(super) dy: Rows,
    pub(super) dx: Rows,
    pub(super) add: bool,
    pub(super) dw: Span<f32>,
    pub(super) db: Option<Span<f32>>,
}

/// `y = norm(x) w + b`, and each token's statistics.
pub(super) fn forward(
    team: Team,
    norm: Norm,
    x: Rows,
    [w, stats]: [Span<f32>; 2],
    b: Option<Span<f32>>,
    y: Rows,
) {
    let per = Team::rows_per_task(x.cols);
    team.each(
        x.rows.div_ceil(per),
        #[inline(always)]
        |task| {
            for i in part(task, per, x.rows) {
                // SAFETY: x, w and b are only read; this token's y and stats are its task's own.
                let (row, w, y, stats) = unsafe {
                    let stats = stats.slice_mut(2 * i..2 * i + 2);
                    (x.row(i), w.slice(0..x.cols), y.row_mut(i), stats)
                };
                let (mean, scale) = statistics(norm, row);
                stats.copy_from_slice(&[mean, scale]);
                match b {
                    // SAFETY: b is only read.
                    Some(b) => affine(row, w, unsafe { b.slice(0..x.cols) }, y, mean, scale),
                    None => {
                        for ((y, x), w) in y.iter_mut().zip(row).zip(w) {
                            *y = (x - mean) * scale * w;
                        }
                    }
                }
            }
        },
    );
}

#[inline(always)]
fn affine(x: &[f32], w: &[f32], b: &[f32], y: &mut [f32], mean: f32, scale: f32) {
    for (((y, x), w), b) in y.iter_mut().zip(x).zip(w).zip(b) {
        *y = ((x - mean) * scale).mul_add(*w, *b);
    }
}

/// What is subtracted from each channel of a token, and what it is multiplied by.
#[inline(always)]
fn statistics(norm: Norm, x: &[f32]) -> (f32, f32) {
    let n = x.len() as f32;
    match norm {
        Norm::Layer { eps } => {
            let mean = sum_of(
                x,
                #[inline(always)]
                |x| x,
            ) / n;
            // A second pass: the mean of squares minus the squared mean would cancel.
            let variance = sum_of(
                x,
                #[inline(always)]
                |x| (x - mean) * (x - mean),
            ) / n;
            (mean, 1.0 / (variance + eps).sqrt())
        }
        Norm::Rms { eps } => {
            let square = sum_of(
                x,
                #[inline(always)]
                |x| x * x,
            ) / n;
            (0.0, 1.0 / (square + eps).sqrt())
        }
    }
}

/// `dx =` or `+=`, `dw +=`, `db +=`.
///
/// The sums for dw and db read dy before dx, which may be the same, is written.
pub(super) fn backward(team: Team, norm: Norm, at: Backward) {
    let tokens = at.x.rows.div_ceil(TOKENS);
    let channels = at.x.cols.div_ceil(CHANNELS);
    let centred = matches!(norm, Norm::Layer { .. });
    if team.threads == 1 {
        // One pass, so that the second reader of a block of tokens finds it in the cache.
        team.each(
            tokens,
            #[inline(always)]
            |token| {
                for channel in 0..channels {
                    weights_block(&at, token, channel);
                }
                tokens_backward(&at, centred, token);
            },
        );
    } else {
        over_blocks(
            team,
            tokens,
            channels,
            #[inline(always)]
            |token, channel| weights_block(&at, token, channel),
        );
        team.each(
            tokens,
            #[inline(always)]
            |token| tokens_backward(&at, centred, token),
        );
    }
}

/// Adds one block of tokens to dw and db of one block of channels.
#[inline(always)]
fn weights_block(at: &Backward, token: usize, channel: usize) {
    let channel = part(channel, CHANNELS, at.x.cols);
    let (mut dw, mut db) = ([0.0_f32; CHANNELS], [0.0_f32; CHANNELS]);
    for i in part(token, TOKENS, at.x.rows) {
        // SAFETY: none of these is written meanwhile.
        let (x, dy, stats) = unsafe {
            let stats = at.stats.slice(2 * i..2 * i + 2);
            (&at.x.row(i)[channel.clone()], &at.dy.row(i)[channel.clone()], stats)
        };
        let (mean, scale) = (stats[0], stats[1]);
        for (((dw, db), x), g) in dw.iter_mut().zip(&mut db).zip(x).zip(dy) {
            *dw = g.mul_add((x - mean) * scale, *dw);
            *db += g;
        }
    }
    // SAFETY: these channels are this task's own.
    unsafe {
        add_to(at.dw.slice_mut(channel.clone()), &dw);
        if let Some(to) = at.db {
            add_to(to.slice_mut(channel), &db);
        }
    }
}

/// dx of one block of tokens: `(g - mean(g) - h mean(g h)) / std` with `g = dy w` and h the
/// normalised x; the first mean only where forward subtracts one.
#[inline(always)]
fn tokens_backward(at: &Backward, centred: bool, token: usize) {
    let cols = at.x.cols;
    for i in part(token, TOKENS, at.x.rows) {
        let slope = {
            // SAFETY: these slices end before dx is written.
            let (x, dy, w, stats) = unsafe {
                let stats = at.stats.slice(2 * i..2 * i + 2);
                (at.x.row(i), at.dy.row(i), at.w.slice(0..cols), stats)
            };
            let (mean, scale) = (stats[0], stats[1]);
            let (g, gh) = two_sums(x, dy, w, mean, scale);
            let mean_g = if centred { g / cols as f32 } else { 0.0 };
            Slope { mean, scale, mean_g, mean_gh: gh / cols as f32 }
        };
        let (x, dy) = (at.x.ptr(i).cast_const(), at.dy.ptr(i).cast_const());
        let (w, dx) = (at.w.ptr().cast_const(), at.dx.ptr(i));
        // SAFETY: row i of each, of `cols` elements; dx is this task's own, and dy or apart.
        unsafe {
            if at.add {
                map(
                    cols,
                    [x, dy, w, dx],
                    [dx],
                    #[inline(always)]
                    |_, [x, dy, w, dx]| [dx + slope.at(x, dy, w)],
                );
            } else {
                map(
                    cols,
                    [x, dy, w],
                    [dx],
                    #[inline(always)]
                    |_, [x, dy, w]| [slope.at(x, dy, w)],
                );
            }
        }
    }
}

/// What dx of one token has in common.
#[derive(Clone, Copy)]
struct Slope {
    mean: f32,
    scale: f32,
    mean_g: f32,
    mean_gh: f32,
}

impl Slope {
    #[inline(always)]
    fn at(self, x: f32, dy: f32, w: f32) -> f32 {
        let h = (x - self.mean) * self.scale;
        h.mul_add(-self.mean_gh, dy.mul_add(w, -self.mean_g)) * self.scale
    }
}

/// Sums of `g` and of `g h`.
#[inline(always)]
fn two_sums(x: &[f32], dy: &[f32], w: &[f32], mean: f32, scale: f32) -> (f32, f32) {
    let mut g_sums = [0.0_f32; LANES];
    let mut gh_sums = [0.0_f32; LANES];
    let blocks = x.chunks(LANES).zip(dy.chunks(LANES)).zip(w.chunks(LANES));
    for ((x, dy), w) in blocks {
        if let (Ok(x), Ok(dy), Ok(w)) = (x.try_into(), dy.try_into(), w.try_into()) {
            let (x, dy, w): (&[f32; LANES], &[f32; LANES], &[f32; LANES]) = (x, dy, w);
            for i in 0..LANES {
                let g = dy[i] * w[i];
                g_sums[i] += g;
                gh_sums[i] = g.mul_add((x[i] - mean) * scale, gh_sums[i]);
            }
        } else {
            for i in 0..x.len() {
                let g = dy[i] * w[i];
                g_sums[i] += g;
                gh_sums[i] = g.mul_add((x[i] - mean) * scale, gh_sums[i]);
            }
        }
    }
    (sum(g_sums), sum(gh_sums))
}
