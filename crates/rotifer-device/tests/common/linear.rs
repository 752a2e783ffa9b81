//! Products and biases.

use proptest::prelude::*;
use rotifer_device::{Device, Write, reference};

use super::numbers::Numbers;
use super::*;

/// A sum of n products, in whatever order and with or without fused steps, is off by at most
/// `n u` times the sum of their magnitudes (Higham 2002, eq. 3.5), and the old value is one more.
fn sum_tolerance(n: usize, magnitude: f64) -> f64 {
    (n + 2) as f64 * UNIT * magnitude
}

pub fn check_matmul(devices: &[&dyn Device]) {
    let side = || prop_oneof![1 => Just(0), 12 => widths()];
    let shapes = ([side(), side(), side()], input_layouts(), input_layouts(), layouts());
    for_all(devices, (shapes, writes(), any::<u64>()), |field, (shapes, write, seed)| {
        let ([m, k, n], a_layout, b_layout, c_layout) = *shapes;
        let numbers = &mut Numbers::new(*seed);
        let (a, b) = (numbers.normals(m * k), numbers.normals(k * n));
        let (old, base) = before(*write, numbers, m * n);
        let a_at = field.matrix(&a, [m, k], a_layout);
        let b_at = field.matrix(&b, [k, n], b_layout);
        let c_at = field.matrix(&old, [m, n], c_layout);
        field.call(&[c_at], |device| device.matmul(a_at, b_at, c_at, *write));
        let (a, b) = (wide(&a), wide(&b));
        let want = sum(&reference::matmul(&a, &b, [m, k, n]), &base);
        let size = sum(&reference::matmul(&abs(&a), &abs(&b), [m, k, n]), &abs(&base));
        assert_close("c", &field.matrix_values(c_at), &want, |i| sum_tolerance(k, size[i]));
    });
}

/// A shard's columns of one matrix times another's, into the columns of a third shard.
pub fn check_matmul_within_one_matrix(devices: &[&dyn Device]) {
    for_all(devices, any::<u64>(), |field, seed| {
        let (t, c) = (33, 21);
        let values = Numbers::new(*seed).normals(t * 3 * c);
        let whole = field.matrix(&values, [t, 3 * c], Layout::default());
        let [a, b, out] = [0, 1, 2].map(|shard| whole.columns(shard * c..(shard + 1) * c));
        let out = out.rows(0..c);
        field.call(&[out], |device| device.matmul(a.t(), b, out, Write::Add));
        let columns = |shard: usize| -> Vec<f64> {
            let rows = values.chunks_exact(3 * c);
            rows.flat_map(|row| wide(&row[shard * c..(shard + 1) * c])).collect()
        };
        let (a, b, old) = (reference::transpose(&columns(0), t, c), columns(1), columns(2));
        let want = sum(&reference::matmul(&a, &b, [c, t, c]), &old);
        let size = sum(&reference::matmul(&abs(&a), &abs(&b), [c, t, c]), &abs(&old));
        assert_close("out", &field.matrix_values(out), &want, |i| sum_tolerance(t, size[i]));
    });
}

pub fn check_bias(devices: &[&dyn Device]) {
    let cases = (heights(), widths(), layouts(), writes(), any::<u64>());
    for_all(devices, cases, |field, (t, o, layout, write, seed)| {
        let numbers = &mut Numbers::new(*seed);
        let b = numbers.normals(*o);
        let (old, base) = before(*write, numbers, t * o);
        let (b_at, y_at) = (field.floats(&b), field.matrix(&old, [*t, *o], *layout));
        field.call(&[y_at], |device| device.bias(b_at, y_at, *write));
        let want = reference::bias(&base, &wide(&b));
        // One rounded addition.
        assert_close("y", &field.matrix_values(y_at), &want, |i| UNIT * want[i].abs());
    });
}

pub fn check_bias_backward(devices: &[&dyn Device]) {
    let cases = (heights(), widths(), layouts(), any::<u64>());
    for_all(devices, cases, |field, (t, o, layout, seed)| {
        let numbers = &mut Numbers::new(*seed);
        let (dy, old) = (numbers.normals(t * o), numbers.normals(*o));
        let (dy_at, db_at) = (field.matrix(&dy, [*t, *o], *layout), field.floats(&old));
        field.call(&[flat(db_at)], |device| device.bias_backward(dy_at, db_at));
        let (dy, old) = (wide(&dy), wide(&old));
        let want = sum(&reference::bias_backward(&dy, *o), &old);
        let size = sum(&reference::bias_backward(&abs(&dy), *o), &abs(&old));
        assert_close("db", &field.values(db_at), &want, |i| sum_tolerance(*t, size[i]));
    });
}
