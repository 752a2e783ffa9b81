//! Nonlinearities.

use proptest::prelude::*;
use rotifer_device::{Activation, Device, reference};

use super::numbers::Numbers;
use super::*;

const ACTIVATIONS: &[Activation] = &[Activation::GeluTanh, Activation::GeluErf, Activation::Silu];

/// Inputs where the curve bends, in its tails, and far outside.
fn inputs(numbers: &mut Numbers, n: usize) -> Vec<f32> {
    const SCALES: [f32; 6] = [1e-30, 1e-3, 1.0, 5.0, 30.0, 1e4];
    (0..n).map(|_| numbers.normal() * SCALES[numbers.below(SCALES.len())]).collect()
}

/// `f(x) = x g(x)` with g in [0, 1], which may be off by 8 units of roundoff, an exponential, a
/// division and a polynomial being about that.
const CURVE: f64 = 8.0 * UNIT;

/// `f' = g + x g'`. In the tanh form `g' = 2 u' g (1 - g)`; the difference is off by as much as g,
/// and `2 x u'` is 20 where it has not yet vanished (x = 4).
const SLOPE: f64 = 64.0 * UNIT;

pub fn check_activation(devices: &[&dyn Device]) {
    let cases = (one_of(ACTIVATIONS), lengths(), any::<bool>(), any::<u64>());
    for_all(devices, cases, |field, (f, n, in_place, seed)| {
        let numbers = &mut Numbers::new(*seed);
        let (x, dy) = (inputs(numbers, *n), numbers.normals(*n));
        let x_at = field.floats(&x);
        let dy_at = field.floats(&dy);
        let dx_at = if *in_place { dy_at } else { field.floats(&vec![f32::NAN; *n]) };
        field.call(&[flat(dx_at)], |device| device.activation_backward(*f, x_at, dy_at, dx_at));
        let y_at = if *in_place { x_at } else { field.floats(&vec![f32::NAN; *n]) };
        field.call(&[flat(y_at)], |device| device.activation(*f, x_at, y_at));
        let (x, dy) = (wide(&x), wide(&dy));
        let want: Vec<f64> = x.iter().map(|x| reference::activation(*f, *x)).collect();
        assert_close("y", &field.values(y_at), &want, |i| CURVE * x[i].abs());
        let slope = |(x, dy): (&f64, &f64)| reference::activation_slope(*f, *x) * dy;
        let want: Vec<f64> = x.iter().zip(&dy).map(slope).collect();
        assert_close("dx", &field.values(dx_at), &want, |i| SLOPE * dy[i].abs());
    });
}

pub fn check_gated(devices: &[&dyn Device]) {
    let cases = (one_of(ACTIVATIONS), lengths(), one_of(&[0, 1, 2]), any::<u64>());
    for_all(devices, cases, |field, (f, n, output, seed)| {
        let numbers = &mut Numbers::new(*seed);
        let (gate, up, dy) = (inputs(numbers, *n), numbers.normals(*n), numbers.normals(*n));
        let room = || field.floats(&vec![f32::NAN; *n]);
        let [gate_at, up_at, dy_at] = [&gate, &up, &dy].map(|values| field.floats(values));
        let (dgate_at, dup_at) = (room(), if *output == 0 { room() } else { dy_at });
        field.call(&[flat(dgate_at), flat(dup_at)], |device| {
            device.gated_backward(*f, gate_at, up_at, dy_at, dgate_at, dup_at);
        });
        let y_at = [room(), gate_at, up_at][*output];
        field.call(&[flat(y_at)], |device| device.gated(*f, gate_at, up_at, y_at));
        let (gate, up, dy) = (wide(&gate), wide(&up), wide(&dy));
        let each = |f: &dyn Fn(usize) -> f64| (0..*n).map(f).collect::<Vec<f64>>();
        let want = each(&|i| reference::gated(*f, gate[i], up[i]));
        assert_close("y", &field.values(y_at), &want, |i| 1.25 * CURVE * (gate[i] * up[i]).abs());
        let want = each(&|i| reference::gated_backward(*f, gate[i], up[i], dy[i]).0);
        let tolerance = |i: usize| 1.25 * SLOPE * (up[i] * dy[i]).abs();
        assert_close("dgate", &field.values(dgate_at), &want, tolerance);
        let want = each(&|i| reference::gated_backward(*f, gate[i], up[i], dy[i]).1);
        let tolerance = |i: usize| 1.25 * CURVE * (gate[i] * dy[i]).abs();
        assert_close("dup", &field.values(dup_at), &want, tolerance);
    });
}
