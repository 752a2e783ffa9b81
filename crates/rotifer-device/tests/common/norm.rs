//! Normalisation.

use proptest::prelude::*;
use rotifer_device::{Device, Dtype, Mat, Norm, Region, Write, reference};

use super::numbers::Numbers;
use super::*;

const NORMS: &[Norm] =
    &[Norm::Layer { eps: 1e-5 }, Norm::Rms { eps: 1e-5 }, Norm::Layer { eps: 1e-2 }];

/// Tokens far from zero, tiny ones whose variance eps outweighs, and large ones.
fn tokens(numbers: &mut Numbers, [t, c]: [usize; 2]) -> Vec<f32> {
    const SCALES: [(f32, f32); 4] = [(0.0, 1.0), (3.0, 1.0), (0.0, 1e-3), (-5.0, 40.0)];
    let mut x = Vec::with_capacity(t * c);
    for _ in 0..t {
        let (mean, scale) = SCALES[numbers.below(SCALES.len())];
        x.extend((0..c).map(|_| mean + scale * numbers.normal()));
    }
    x
}

/// Statistics of a token that its errors depend on.
#[derive(Clone, Copy)]
struct Token {
    mean: f64,
    /// 1/std.
    scale: f64,
    /// Largest `|x| / std`: what rounding in the mean costs in terms of h.
    largest: f64,
    /// Largest `|x - mean| / std`.
    h: f64,
}

fn token(norm: Norm, x: &[f64]) -> Token {
    let (mean, scale) = reference::norm_statistics(norm, x);
    let largest = |f: &dyn Fn(f64) -> f64| x.iter().map(|x| f(*x).abs()).fold(0.0, f64::max);
    Token { mean, scale, largest: largest(&|x| x) * scale, h: largest(&|x| x - mean) * scale }
}

pub fn check_norm(devices: &[&dyn Device]) {
    let shapes = (heights(), widths(), layouts(), layouts());
    let cases = (one_of(NORMS), shapes, any::<bool>(), any::<u64>());
    for_all(devices, cases, |field, (norm, (t, c, x_layout, y_layout), with_bias, seed)| {
        let (t, c, numbers) = (*t, *c, &mut Numbers::new(*seed));
        let (x, w, b) = (tokens(numbers, [t, c]), numbers.normals(c), numbers.normals(c));
        let x_at = field.matrix(&x, [t, c], *x_layout);
        let w_at = field.floats(&w);
        let b_at = if *with_bias { field.floats(&b) } else { Region::empty(Dtype::F32) };
        let y_at = field.matrix(&vec![f32::NAN; t * c], [t, c], *y_layout);
        let stats_at = field.floats(&vec![f32::NAN; 2 * t]);
        let outputs = [y_at, flat(stats_at)];
        field.call(&outputs, |device| device.norm(*norm, x_at, w_at, b_at, y_at, stats_at));

        let (x, w, b) = (wide(&x), wide(&w), wide(&b));
        let (want, stats) = reference::norm(*norm, &x, &w, with_bias.then_some(&b));
        // The mean is off by n u max|x|. The variance, from a second pass, is off by a factor of
        // n u, and by the square of the mean's error, which is less.
        let steps = (c + 8) as f64 * UNIT;
        let sizes: Vec<Token> = x.chunks_exact(c).map(|row| token(*norm, row)).collect();
        assert_close("y", &field.matrix_values(y_at), &want, |i| {
            let Token { largest, h, .. } = sizes[i / c];
            steps * (2.0 * largest + h) * w[i % c].abs() + UNIT * b[i % c].abs()
        });
        assert_close("stats", &field.values(stats_at), &stats, |i| {
            let Token { largest, scale, .. } = sizes[i / 2];
            let mean_off = steps * largest / scale;
            if i % 2 == 0 {
                mean_off
            } else {
                scale * (steps + mean_off * mean_off * scale * scale)
            }
        });
    });
}

/// Operands of one backward call.
struct Backward {
    x: Vec<f32>,
    w: Vec<f32>,
    dy: Vec<f32>,
    old_dw: Vec<f32>,
    old_db: Vec<f32>,
}

pub fn check_norm_backward(devices: &[&dyn Device]) {
    let shapes = (heights(), widths(), layouts(), layouts());
    let how = (writes(), any::<bool>(), any::<bool>());
    for_all(devices, (one_of(NORMS), shapes, how, any::<u64>()), |field, case| {
        let (norm, (t, c, layout, dx_layout), (write, with_bias, in_place), seed) = *case;
        let numbers = &mut Numbers::new(seed);
        let x = tokens(numbers, [t, c]);
        let (w, dy) = (numbers.normals(c), numbers.normals(t * c));
        let (old_dw, old_db) = (numbers.normals(c), numbers.normals(c));
        let (old_dx, base_dx) = before(write, numbers, t * c);
        let (_, stats) = reference::norm(norm, &wide(&x), &wide(&w), None);
        let stats: Vec<f32> = stats.iter().map(|x| *x as f32).collect();

        let [x_at, dy_at] = [&x, &dy].map(|values| field.matrix(values, [t, c], layout));
        let [w_at, stats_at, dw_at] = [&w, &stats, &old_dw].map(|values| field.floats(values));
        let db_at = if with_bias { field.floats(&old_db) } else { Region::empty(Dtype::F32) };
        let in_place = in_place && write == Write::Set;
        let dx_at = if in_place { dy_at } else { field.matrix(&old_dx, [t, c], dx_layout) };
        let outputs = [dx_at, flat(dw_at), flat(db_at)];
        field.call(&outputs, |device| {
            device.norm_backward(norm, x_at, w_at, stats_at, dy_at, dx_at, write, dw_at, db_at);
        });
        let operands = Backward { x, w, dy, old_dw, old_db };
        compare_backward(field, norm, &operands, &base_dx, (dx_at, dw_at, db_at));
    });
}

fn compare_backward(
    field: &Field<'_>,
    norm: Norm,
    operands: &Backward,
    base_dx: &[f64],
    (dx_at, dw_at, db_at): (Mat, Region, Region),
) {
    let Backward { x, w, dy, old_dw, old_db } = operands;
    let [x, w, dy, old_dw, old_db] = [x, w, dy, old_dw, old_db].map(|values| wide(values));
    let (t, c) = (x.len() / w.len(), w.len());
    let [dx, dw, db] = reference::norm_backward(norm, &x, &w, &dy);
    let sizes: Vec<Token> = x.chunks_exact(c).map(|row| token(norm, row)).collect();
    let g_max = |dy: &[f64]| dy.iter().zip(&w).map(|(dy, w)| (dy * w).abs()).fold(0.0, f64::max);
    let g: Vec<f64> = dy.chunks_exact(c).map(g_max).collect();
    // The two means over c are of terms up to G = max|g| and G h; the saved statistics are rounded,
    // which moves h by u (largest + h).
    let steps = (c + 8) as f64 * UNIT;
    assert_close("dx", &field.matrix_values(dx_at), &sum(&dx, base_dx), |i| {
        let (Token { largest, h, scale, .. }, g) = (sizes[i / c], g[i / c]);
        let off = g * (2.0 + 2.0 * h * h) * steps + 4.0 * UNIT * g * (1.0 + h) * (largest + h);
        scale * off + UNIT * base_dx[i].abs()
    });
    let mut size_dw = abs(&old_dw);
    let mut shift_dw = vec![0.0; c];
    for (i, (x, dy)) in x.iter().zip(&dy).enumerate() {
        let Token { mean, scale, largest, h } = sizes[i / c];
        size_dw[i % c] += (dy * (x - mean) * scale).abs();
        shift_dw[i % c] += dy.abs() * (largest + h);
    }
    assert_close("dw", &field.values(dw_at), &sum(&dw, &old_dw), |j| {
        (t + 4) as f64 * UNIT * size_dw[j] + 4.0 * UNIT * shift_dw[j]
    });
    if !db_at.is_empty() {
        let size = sum(&reference::bias_backward(&abs(&dy), c), &abs(&old_db));
        let tolerance = |j: usize| (t + 2) as f64 * UNIT * size[j];
        assert_close("db", &field.values(db_at), &sum(&db, &old_db), tolerance);
    }
}
