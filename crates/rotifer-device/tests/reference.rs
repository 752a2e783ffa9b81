//! Why the twins can be trusted: each backward is the numerical derivative of its forward, and the
//! forwards give PyTorch's numbers (computed with PyTorch 2.13 in `float64`).

#[path = "common/numbers.rs"]
mod numbers;

use numbers::Numbers;
use rotifer_device::reference::{self, Masks};
use rotifer_device::{Activation, AdamW, Attention, Norm, Rotary, Sgd, Write};

const ACTIVATIONS: [Activation; 3] = [Activation::GeluTanh, Activation::GeluErf, Activation::Silu];
const NORMS: [Norm; 2] = [Norm::Layer { eps: 1e-2 }, Norm::Rms { eps: 1e-2 }];

fn doubles(numbers: &mut Numbers, n: usize) -> Vec<f64> {
    numbers.normals(n).into_iter().map(f64::from).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `(L(x + h) - L(x - h)) / 2h` is off by h^2 of the third derivative and by the rounding of L over
/// h: with h = 1e-5 and values of about 10, by 1e-9 each.
fn assert_gradient(what: &str, x: &[f64], gradient: &[f64], loss: impl Fn(&[f64]) -> f64) {
    const STEP: f64 = 1e-5;
    assert_eq!(x.len(), gradient.len(), "{what}");
    let mut moved = x.to_vec();
    for i in 0..x.len() {
        let mut at = |x_i: f64| {
            moved[i] = x_i;
            loss(&moved)
        };
        let numeric = (at(x[i] + STEP) - at(x[i] - STEP)) / (2.0 * STEP);
        at(x[i]);
        let off = (numeric - gradient[i]).abs();
        assert!(off < 1e-7 * (1.0 + numeric.abs()), "{what}[{i}]: {} not {numeric}", gradient[i]);
    }
}

fn assert_equal(what: &str, got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() <= 1e-13 * (1.0 + want.abs()), "{what}: {got} not {want}");
    }
}

#[test]
fn products_of_transposes_are_the_gradients_of_a_product() {
    let (m, k, n) = (3, 4, 5);
    let numbers = &mut Numbers::new(1);
    let [a, b, dc] = [m * k, k * n, m * n].map(|len| doubles(numbers, len));
    let da = reference::matmul(&dc, &reference::transpose(&b, k, n), [m, n, k]);
    let db = reference::matmul(&reference::transpose(&a, m, k), &dc, [k, m, n]);
    assert_gradient("a", &a, &da, |a| dot(&dc, &reference::matmul(a, &b, [m, k, n])));
    assert_gradient("b", &b, &db, |b| dot(&dc, &reference::matmul(&a, b, [m, k, n])));
}

#[test]
fn bias_backward_is_the_gradient() {
    let numbers = &mut Numbers::new(2);
    let [x, b, dy] = [15, 5, 15].map(|len| doubles(numbers, len));
    let db = reference::bias_backward(&dy, 5);
    assert_gradient("b", &b, &db, |b| dot(&dy, &reference::bias(&x, b)));
}

#[test]
fn norm_backward_is_the_gradient() {
    for norm in NORMS {
        let numbers = &mut Numbers::new(3);
        let [x, w, b, dy] = [28, 7, 7, 28].map(|len| doubles(numbers, len));
        let loss =
            |x: &[f64], w: &[f64], b: &[f64]| dot(&dy, &reference::norm(norm, x, w, Some(b)).0);
        let [dx, dw, db] = reference::norm_backward(norm, &x, &w, &dy);
        assert_gradient("x", &x, &dx, |x| loss(x, &w, &b));
        assert_gradient("w", &w, &dw, |w| loss(&x, w, &b));
        assert_gradient("b", &b, &db, |b| loss(&x, &w, b));
    }
}

#[test]
fn slopes_are_the_gradients_of_activations() {
    let x: Vec<f64> = (-60..=60).map(|i| f64::from(i) / 10.0).collect();
    let up = doubles(&mut Numbers::new(4), x.len());
    let dy = doubles(&mut Numbers::new(5), x.len());
    for f in ACTIVATIONS {
        let slope: Vec<f64> = x.iter().map(|x| reference::activation_slope(f, *x)).collect();
        let total = |x: &[f64]| x.iter().map(|x| reference::activation(f, *x)).sum();
        assert_gradient("activation", &x, &slope, total);
        let loss = |gate: &[f64], up: &[f64]| -> f64 {
            (0..dy.len()).map(|i| dy[i] * reference::gated(f, gate[i], up[i])).sum()
        };
        let both = (0..x.len()).map(|i| reference::gated_backward(f, x[i], up[i], dy[i]));
        let (dgate, dup): (Vec<f64>, Vec<f64>) = both.unzip();
        assert_gradient("gate", &x, &dgate, |gate| loss(gate, &up));
        assert_gradient("up", &up, &dup, |up| loss(&x, up));
    }
}

#[test]
fn attention_backward_is_the_gradient_any_mask() {
    let shape = Attention {
        batch: 2,
        seq: 5,
        heads: 4,
        kv_heads: 2,
        head_dim: 3,
        scale: 0.7,
        documents: None,
        lengths: None,
    };
    let (documents, lengths) = ([1, 1, 2, 2, 2, 0, 5, 5, 0, 5], [4, 0]);
    let numbers = &mut Numbers::new(6);
    let [qkv, dy] = [10 * shape.qkv_width(), 10 * 12].map(|len| doubles(numbers, len));
    for documents in [None, Some(&documents[..])] {
        for lengths in [None, Some(&lengths[..])] {
            let masks = Masks { documents, lengths };
            let dqkv = reference::attention_backward(&shape, masks, &qkv, &dy);
            let loss = |qkv: &[f64]| dot(&dy, &reference::attention(&shape, masks, qkv).0);
            assert_gradient("qkv", &qkv, &dqkv, loss);
        }
    }
}

#[test]
fn inverse_rotary_is_the_gradient_of_rotary() {
    let turn = Rotary { heads: 2, head_dim: 6, theta: 100.0, inverse: false };
    let (positions, width) = ([0, 3, 11], 13);
    let numbers = &mut Numbers::new(7);
    let [x, dy] = [3 * width, 3 * width].map(|len| doubles(numbers, len));
    let back = Rotary { inverse: true, ..turn };
    let dx = reference::rotary(&back, &positions, &dy, width);
    let loss = |x: &[f64]| dot(&dy, &reference::rotary(&turn, &positions, x, width));
    assert_gradient("x", &x, &dx, loss);
}

#[test]
fn embedding_backward_is_the_gradient() {
    let (numbers, c) = (&mut Numbers::new(8), 4);
    // On both sides of the table's 3, 4 and 5, and some of them twice.
    let ids = [(); 6].map(|()| numbers.below(9) as i32 - 1);
    let [table, dy] = [3 * c, 6 * c].map(|len| doubles(numbers, len));
    let mut dtable = vec![0.0; table.len()];
    reference::embedding_backward(&ids, &dy, 3, c, &mut dtable);
    assert_gradient("table", &table, &dtable, |table| {
        let mut y = vec![0.0; dy.len()];
        reference::embedding(&ids, table, 3, c, &mut y, Write::Set);
        dot(&dy, &y)
    });
}

/// lse and loss of logits [t, 6] that come in blocks of 2, 1 and 3 classes.
fn blocked_loss(logits: &[f64], targets: &[i32]) -> (Vec<f64>, f64) {
    let mut state = [f64::NEG_INFINITY, 0.0, 0.0].repeat(targets.len());
    for classes in [0..2, 2..3, 3..6] {
        let rows = logits.chunks_exact(6);
        let block: Vec<f64> = rows.flat_map(|row| row[classes.clone()].to_vec()).collect();
        reference::loss_block(&block, classes.start, targets, &mut state);
    }
    reference::loss_finish(&state, targets)
}

#[test]
fn loss_backward_is_the_gradient_and_blocks_are_one_softmax() {
    let targets = [0, 5, -1, 2];
    let logits = doubles(&mut Numbers::new(9), 24);
    let (lse, _) = blocked_loss(&logits, &targets);
    for (lse, row) in lse.iter().zip(logits.chunks_exact(6)) {
        assert_equal("lse", &[*lse], &[row.iter().map(|x| x.exp()).sum::<f64>().ln()]);
    }
    let gradient = reference::loss_backward(&logits, 0, &targets, &lse, 0.25);
    assert_gradient("logits", &logits, &gradient, |x| 0.25 * blocked_loss(x, &targets).1);
}

#[test]
fn adamw_gives_pytorchs_numbers() {
    let mut w = [0.5, -1.25, 2.0];
    let (mut m, mut v) = ([0.0; 3], [0.0; 3]);
    for (i, g) in [[0.1, -2.0, 0.0], [-0.3, 1e-9, 4.0], [0.7, -0.5, -1.0]].iter().enumerate() {
        let step = AdamW {
            lr: 0.125,
            beta1: 0.875,
            beta2: 0.96875,
            eps: 1.0 / 1024.0,
            weight_decay: 0.25,
            step: i as u64 + 1,
            grad_scale: 0.5,
        };
        let doubled = g.map(|g| 2.0 * g);
        reference::adamw(&step, &mut w, &doubled, &mut m, &mut v);
    }
    assert_equal("w", &w, &[0.34506804539838104, -0.8568145888563676, 1.6780561313034892]);
    assert_equal("m", &m, &[0.0642578125, -0.253906249890625, 0.3125]);
    assert_equal("v", &v, &[0.01833038330078125, 0.1251220703125, 0.515625]);
}

#[test]
fn sgd_gives_pytorchs_numbers_but_for_the_decoupled_decay() {
    let step = Sgd { lr: 0.125, momentum: 0.875, weight_decay: 0.0, grad_scale: 1.0 };
    let (mut w, mut m) = ([0.5, -1.25, 2.0], [0.0; 3]);
    for g in [[0.1, -2.0, 0.0], [-0.3, 1e-9, 4.0], [0.7, -0.5, -1.0]] {
        reference::sgd(&step, &mut w, &g, &mut m);
    }
    assert_equal("w", &w, &[0.44980468749999997, -0.527343750234375, 1.1875]);
    assert_equal("m", &m, &[0.5140625, -2.031249999125, 2.5]);
    let decay = Sgd { weight_decay: 0.5, momentum: 0.0, ..step };
    let mut w = [0.5, -1.25];
    reference::sgd(&decay, &mut w, &[0.0, 1.0], &mut []);
    assert_equal("w", &w, &[0.5 * 0.9375, -1.25 * 0.9375 - 0.125]);
}

#[test]
fn activations_give_pytorchs_numbers() {
    const X: [f64; 6] = [-6.0, -1.5, -0.25, 0.0, 0.75, 3.0];
    let want = [
        [
            -8.43964897967453e-11,
            -0.10042842301976707,
            -0.100324649298315,
            0.0,
            0.5799605551656203,
            2.996362607918227,
        ],
        [
            -5.919525869479969e-09,
            -0.10021080190328704,
            -0.10032341857926907,
            0.0,
            0.5800294857173489,
            2.99595030590511,
        ],
        [
            -0.014835738939808647,
            -0.2736382857095345,
            -0.10945587477855048,
            0.0,
            0.5093840243815447,
            2.8577223804672998,
        ],
    ];
    for (f, want) in ACTIVATIONS.into_iter().zip(want) {
        assert_equal("activation", &X.map(|x| reference::activation(f, x)), &want);
    }
}

#[test]
fn norms_give_pytorchs_numbers() {
    let (x, w, b) = ([1.0, -2.0, 0.5, 4.0], [1.0, 0.5, -1.0, 2.0], [0.0, 1.0, -0.5, 0.25]);
    let eps = 1.0 / 1024.0;
    let (layer, _) = reference::norm(Norm::Layer { eps }, &x, &w, Some(&b));
    let want = [0.05861474397534143, 0.32593044428357354, -0.3241557680739757, 3.1807371987670714];
    assert_equal("layer", &layer, &want);
    let (rms, _) = reference::norm(Norm::Rms { eps }, &x, &w, None);
    let want = [0.4338210442118146, -0.4338210442118146, -0.2169105221059073, 3.470568353694517];
    assert_equal("rms", &rms, &want);
}

#[test]
fn attention_gives_pytorchs_numbers_2_heads_of_1() {
    let shape = Attention {
        batch: 1,
        seq: 3,
        heads: 2,
        kv_heads: 1,
        head_dim: 2,
        scale: 0.5,
        documents: None,
        lengths: None,
    };
    let qkv = [
        [0.5, -1.0, 1.0, 0.25, 0.75, -0.5, 1.5, 2.0],
        [-0.25, 0.5, 2.0, -1.0, 0.1, 0.9, -1.0, 0.5],
        [1.0, 1.0, -0.5, 0.3, -0.7, 0.2, 0.25, -2.0],
    ];
    let (y, _) = reference::attention(&shape, Masks::default(), qkv.as_flattened());
    let want = [
        [1.5, 2.0, 1.5, 2.0],
        [-0.015430293383658422, 1.0907418239698048, 0.9853240704976318, 1.6911944422985792],
        [0.06900430809199731, 0.43055260867205597, 0.11060088008993989, -0.11521570468714515],
    ];
    assert_equal("y", &y, want.as_flattened());
}

#[test]
fn loss_gives_pytorchs_number_with_ignored_targets() {
    let (logits, targets) = ([1.0, -0.5, 2.0, 0.0, 3.0, -1.0, 0.5, 0.5, 0.25], [2, -1, 0]);
    let mut state = [f64::NEG_INFINITY, 0.0, 0.0].repeat(3);
    reference::loss_block(&logits, 0, &targets, &mut state);
    let (_, loss) = reference::loss_finish(&state, &targets);
    assert_equal("loss", &[loss], &[1.3935584934912346]);
}
