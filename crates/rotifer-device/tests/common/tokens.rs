//! Embedding and loss.

use std::ops::Range;

use proptest::prelude::*;
use rotifer_device::{Device, Mat, Write, reference};

use super::numbers::Numbers;
use super::*;

/// Ids below zero, in the table, and on both sides of it.
fn ids(numbers: &mut Numbers, t: usize, first: usize, rows: usize) -> Vec<i32> {
    let below = |numbers: &mut Numbers| numbers.below(2 * first + rows + 2) as i32 - 1;
    (0..t).map(|_| below(numbers)).collect()
}

pub fn check_embedding(devices: &[&dyn Device]) {
    let sizes = (heights(), 0..=40_usize, widths(), one_of(&[0, 5, 1000]));
    let how = (layouts(), layouts(), writes());
    for_all(devices, (sizes, how, any::<u64>()), |field, case| {
        let ((t, rows, c, first), (table_layout, y_layout, write), seed) = *case;
        let numbers = &mut Numbers::new(seed);
        let ids = ids(numbers, t, first, rows);
        let (table, y) = (numbers.normals(rows * c), numbers.normals(t * c));
        let ids_at = field.ints(&ids);
        let table_at = field.matrix(&table, [rows, c], table_layout);
        let y_at = field.matrix(&y, [t, c], y_layout);
        field.call(&[y_at], |device| device.embedding(ids_at, table_at, first, y_at, write));
        let mut want = wide(&y);
        reference::embedding(&ids, &wide(&table), first, c, &mut want, write);
        // A copy, or one rounded addition.
        let tolerance = if write == Write::Set { 0.0 } else { UNIT };
        let got = field.matrix_values(y_at);
        assert_close("y", &got, &want, |i| tolerance * want[i].abs());

        let dy_at = field.matrix(&y, [t, c], y_layout);
        field.call(&[table_at], |device| device.embedding_backward(ids_at, dy_at, table_at, first));
        let (mut want, mut size) = (wide(&table), abs(&wide(&table)));
        reference::embedding_backward(&ids, &wide(&y), first, c, &mut want);
        reference::embedding_backward(&ids, &abs(&wide(&y)), first, c, &mut size);
        let steps = (t + 1) as f64 * UNIT;
        assert_close("dtable", &field.matrix_values(table_at), &want, |i| steps * size[i]);
    });
}

/// Logits cut in blocks of classes, as shards of a vocabulary.
struct Logits {
    blocks: Vec<Range<usize>>,
    values: Vec<f32>,
    targets: Vec<i32>,
}

impl Logits {
    /// With `masked`, the first token has -inf for every class of the first block.
    fn new(numbers: &mut Numbers, t: usize, widths: &[usize], masked: bool) -> Logits {
        let v: usize = widths.iter().sum();
        let target = |numbers: &mut Numbers| match numbers.below(5) {
            0 => [-1, -100][numbers.below(2)],
            _ => numbers.below(v) as i32,
        };
        let mut targets: Vec<i32> = (0..t).map(|_| target(numbers)).collect();
        let mut values: Vec<f32> = (0..t * v).map(|_| 4.0 * numbers.normal() + 2.0).collect();
        if masked && t > 0 && widths.len() > 1 {
            values[..widths[0]].fill(f32::NEG_INFINITY);
            targets[0] = v as i32 - 1;
        }
        let mut end = 0;
        let next = |width: &usize| {
            end += width;
            end - width..end
        };
        Logits { blocks: widths.iter().map(next).collect(), values, targets }
    }
}

pub fn check_loss(devices: &[&dyn Device]) {
    // Beyond 2048 classes, where a kernel may go over a row in parts.
    let width = || prop_oneof![8 => widths(), 1 => 2_000..=5_000_usize];
    let sizes = (0..=70_usize, proptest::collection::vec(width(), 1..=3));
    let how = (layouts(), any::<bool>(), one_of(&[1.0_f32, 1.0 / 96.0]));
    for_all(devices, (sizes, how, any::<u64>()), |field, case| {
        let ((t, widths), (layout, masked, scale), seed) = case;
        let (t, v) = (*t, widths.iter().sum());
        let logits = Logits::new(&mut Numbers::new(*seed), t, widths, *masked);
        let logits_at = field.matrix(&logits.values, [t, v], *layout);
        let targets_at = field.ints(&logits.targets);
        let state_at = field.floats(&[f32::NEG_INFINITY, 0.0, 0.0].repeat(t));
        for block in &logits.blocks {
            let block_at = logits_at.columns(block.clone());
            field.call(&[flat(state_at)], |device| {
                device.loss_block(block_at, block.start, targets_at, state_at);
            });
        }
        let (lse_at, loss_at) = (field.floats(&vec![f32::NAN; t]), field.double(2.5));
        field.call(&[flat(lse_at)], |device| {
            device.loss_finish(state_at, targets_at, lse_at, loss_at);
        });
        let mut state = [f64::NEG_INFINITY, 0.0, 0.0].repeat(t);
        let values = wide(&logits.values);
        reference::loss_block(&values, 0, &logits.targets, &mut state);
        let (lse, loss) = reference::loss_finish(&state, &logits.targets);
        // The sum's terms are positive, so it is off by a factor of v u, more for exponents of up
        // to 40, rounded; the logarithm makes that absolute.
        let off = |i: usize| UNIT * (v as f64 + 60.0 + 2.0 * lse[i].abs());
        assert_close("lse", &field.values(lse_at), &lse, off);
        let all: f64 = (0..t).map(off).sum();
        assert_close("loss", &[field.double_value(loss_at)], &[2.5 + loss], |_| all);
        check_loss_backward(field, &logits, logits_at, &lse, *scale);
    });
}

/// Every block of classes has a state of its own; joined in turn they are the state of all.
pub fn check_loss_join(devices: &[&dyn Device]) {
    let sizes = (0..=70_usize, proptest::collection::vec(widths(), 1..=4));
    for_all(devices, (sizes, any::<bool>(), any::<u64>()), |field, case| {
        let ((t, widths), masked, seed) = case;
        let t = *t;
        let logits = Logits::new(&mut Numbers::new(*seed), t, widths, *masked);
        let v: usize = widths.iter().sum();
        let values = wide(&logits.values);
        let fresh = [f64::NEG_INFINITY, 0.0, 0.0].repeat(t);
        let of_block = |block: &Range<usize>| {
            let row = |i: usize| &values[i * v + block.start..i * v + block.end];
            let columns: Vec<f64> = (0..t).flat_map(|i| row(i).iter().copied()).collect();
            let mut state = fresh.clone();
            reference::loss_block(&columns, block.start, &logits.targets, &mut state);
            state
        };
        let state_at = field.floats(&[f32::NEG_INFINITY, 0.0, 0.0].repeat(t));
        for block in &logits.blocks {
            let state: Vec<f32> = of_block(block).iter().map(|x| *x as f32).collect();
            let other_at = field.floats(&state);
            field.call(&[flat(state_at)], |device| device.loss_join(other_at, state_at));
        }
        let mut joined = fresh.clone();
        logits.blocks.iter().for_each(|block| reference::loss_join(&of_block(block), &mut joined));
        let mut whole = fresh;
        reference::loss_block(&values, 0, &logits.targets, &mut whole);
        // The reference by two routes, in f64; then the kernel against it, in f32: per block an
        // exponential (8 u, more for exponents of up to 40), a product and a sum.
        assert_eq!(joined.len(), whole.len());
        for (joined, whole) in joined.iter().zip(&whole) {
            assert!(joined == whole || (joined - whole).abs() <= 1e-12 * whole.abs());
        }
        let off = |i: usize| UNIT * 60.0 * widths.len() as f64 * whole[i].abs();
        assert_close("state", &field.values(state_at), &whole, off);
    });
}

fn check_loss_backward(field: &Field<'_>, logits: &Logits, at: Mat, lse: &[f64], scale: f32) {
    let lse: Vec<f32> = lse.iter().map(|x| *x as f32).collect();
    let (targets_at, lse_at) = (field.ints(&logits.targets), field.floats(&lse));
    for block in &logits.blocks {
        let block_at = at.columns(block.clone());
        field.call(&[block_at], |device| {
            device.loss_backward(block_at, block.start, targets_at, lse_at, scale);
        });
    }
    let (values, lse, scale) = (wide(&logits.values), wide(&lse), f64::from(scale));
    let want = reference::loss_backward(&values, 0, &logits.targets, &lse, scale);
    // The exponent is one subtraction, rounded; exp is good to 8 u; then the target's 1 goes off.
    assert_close("dlogits", &field.matrix_values(at), &want, |i| {
        let exponent = values[i] - lse[i / at.cols];
        let softmax =
            if exponent.is_finite() { exponent.exp() * (exponent.abs() + 10.0) } else { 0.0 };
        scale * UNIT * (softmax + 2.0)
    });
}
