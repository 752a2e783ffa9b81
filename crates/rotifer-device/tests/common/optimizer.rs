//! Optimiser updates and the gradient's norm.

use proptest::prelude::*;
use rotifer_device::{AdamW, Device, Sgd, reference};

use super::numbers::Numbers;
use super::*;

pub fn check_adamw(devices: &[&dyn Device]) {
    let rates = (one_of(&[1e-4_f32, 3e-3, 0.5]), one_of(&[0.0_f32, 0.1]), one_of(&[1.0_f32, 0.3]));
    let when = one_of(&[1_u64, 2, 1000, 10_000_000]);
    for_all(devices, (lengths(), rates, when, any::<u64>()), |field, case| {
        let (n, (lr, weight_decay, grad_scale), step, seed) = *case;
        let numbers = &mut Numbers::new(seed);
        let (beta1, beta2, eps) = (0.9, [0.95, 0.999][numbers.below(2)], 1e-8);
        let step = AdamW { lr, beta1, beta2, eps, weight_decay, step, grad_scale };
        let (w, m) = (numbers.normals(n), numbers.normals(n));
        // Some gradients are nought, as those of an unused row of the embedding.
        let g: Vec<f32> =
            (0..n).map(|_| [0.0, 1.0, 1e-3][numbers.below(3)] * numbers.normal()).collect();
        let v: Vec<f32> = (0..n).map(|_| numbers.normal().powi(2)).collect();
        let [w_at, g_at, m_at, v_at] = [&w, &g, &m, &v].map(|values| field.floats(values));
        let outputs = [w_at, m_at, v_at].map(flat);
        field.call(&outputs, |device| device.adamw(&step, w_at, g_at, m_at, v_at));
        let [old_w, g, old_m, old_v] = [&w, &g, &m, &v].map(|values| wide(values));
        let (mut w, mut m, mut v) = (old_w.clone(), old_m.clone(), old_v.clone());
        reference::adamw(&step, &mut w, &g, &mut m, &mut v);
        // A handful of roundings each. m may cancel, so its error is in terms of what it is made
        // of; v is a sum of positive terms, so the update's denominator is good to a few u.
        let m_off = |i: usize| 4.0 * UNIT * (old_m[i].abs() + g[i].abs());
        assert_close("m", &field.values(m_at), &m, m_off);
        assert_close("v", &field.values(v_at), &v, |i| 6.0 * UNIT * v[i]);
        let correction = |beta: f32| 1.0 - f64::from(beta).powf(step.step as f64);
        assert_close("w", &field.values(w_at), &w, |i| {
            let root = (v[i] / correction(step.beta2)).sqrt() + f64::from(step.eps);
            let per_m = f64::from(step.lr) / correction(step.beta1) / root;
            per_m * (m_off(i) + 12.0 * UNIT * m[i].abs())
                + 4.0 * UNIT * (old_w[i].abs() + w[i].abs())
        });
    });
}

pub fn check_sgd(devices: &[&dyn Device]) {
    let rates = (one_of(&[1e-3_f32, 0.5]), one_of(&[0.0_f32, 0.9]), one_of(&[0.0_f32, 0.1]));
    for_all(devices, (lengths(), rates, any::<u64>()), |field, case| {
        let (n, (lr, momentum, weight_decay), seed) = *case;
        let step = Sgd { lr, momentum, weight_decay, grad_scale: 0.3 };
        let numbers = &mut Numbers::new(seed);
        let (w, g) = (numbers.normals(n), numbers.normals(n));
        let m = numbers.normals(if momentum == 0.0 { 0 } else { n });
        let [w_at, g_at, m_at] = [&w, &g, &m].map(|values| field.floats(values));
        field.call(&[w_at, m_at].map(flat), |device| device.sgd(&step, w_at, g_at, m_at));
        let [old_w, g, old_m] = [&w, &g, &m].map(|values| wide(values));
        let (mut w, mut m) = (old_w.clone(), old_m.clone());
        reference::sgd(&step, &mut w, &g, &mut m);
        let m_off = |i: usize| 4.0 * UNIT * (old_m.get(i).map_or(0.0, |m| m.abs()) + g[i].abs());
        assert_close("m", &field.values(m_at), &m, m_off);
        assert_close("w", &field.values(w_at), &w, |i| {
            2.0 * f64::from(lr) * m_off(i) + 4.0 * UNIT * (old_w[i].abs() + w[i].abs())
        });
    });
}

pub fn check_squared_norm(devices: &[&dyn Device]) {
    for_all(devices, (lengths(), any::<u64>()), |field, (n, seed)| {
        let x = Numbers::new(*seed).normals(*n);
        let (x_at, sum_at) = (field.floats(&x), field.double(0.125));
        field.call(&[], |device| device.squared_norm(x_at, sum_at));
        let want = 0.125 + reference::squared_norm(&wide(&x));
        // Squares of f32 are exact in f64; n roundings of a growing sum are left.
        let off = (*n + 2) as f64 * f64::EPSILON * want;
        assert_close("sum", &[field.double_value(sum_at)], &[want], |_| off);
    });
}
