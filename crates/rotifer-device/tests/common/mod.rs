//! The conformance suite of [`Device`]: every kernel against its `f64` twin.
//!
//! A check takes devices that must agree with the twin within rounding, and with each other to the
//! bit; a new device calls the same checks with itself alone. Operands lie in one region full of a
//! NaN that nothing else makes: reading beyond an operand poisons the result, and after each call
//! every element that is not an output must still have its bits.
//!
//! Shapes: t tokens, c channels, o outputs, v classes; m, k, n of a product.

pub mod attention;
pub mod data;
pub mod elementwise;
pub mod linear;
pub mod norm;
pub mod numbers;
pub mod optimizer;
pub mod random;
pub mod refusals;
pub mod tokens;

use std::cell::{Cell, RefCell};
use std::fmt::Debug;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use rotifer_device::{Arena, Device, Dtype, Mat, Purpose, Region, Write};

use numbers::Numbers;

/// Unit roundoff of `f32`: a correctly rounded operation is off by this factor at most.
pub const UNIT: f64 = 1.0 / (1 << 24) as f64;

/// Elements between operands. No multiple of a vector, so that operands start anywhere.
const GAP: usize = 37;
/// Elements of a field: the largest case of any check.
const FIELD: usize = 1 << 21;
/// A quiet NaN with a payload that no arithmetic makes.
const SENTINEL: f32 = f32::from_bits(0x7FC0_5E47);

/// Runs `check` on 128 cases and on each device, and compares the bits of all outputs.
pub fn for_all<S: Strategy>(
    devices: &[&dyn Device],
    cases: S,
    check: impl Fn(&Field<'_>, &S::Value),
) {
    let fields: Vec<Field<'_>> = devices.iter().map(|device| Field::new(*device)).collect();
    let config = Config { cases: 128, failure_persistence: None, ..Config::default() };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let outcome = TestRunner::new_with_rng(config, rng).run(&cases, |case| {
        for field in &fields {
            field.clear();
            check(field, &case);
            let same = *field.outputs.borrow() == *fields[0].outputs.borrow();
            assert!(same, "{} and {} differ", field.device.name(), fields[0].device.name());
        }
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
}

/// Where the operands of one case lie.
pub struct Field<'d> {
    pub device: &'d dyn Device,
    floats: Region,
    doubles: Region,
    /// The operands so far, and their first elements.
    placed: RefCell<Vec<(Region, usize)>>,
    used: Cell<usize>,
    /// Bits of every output so far.
    outputs: RefCell<Vec<u32>>,
}

/// How a matrix lies in its region.
#[derive(Clone, Copy, Debug, Default)]
pub struct Layout {
    /// Elements of a wider matrix before and after each row.
    pub margins: [usize; 2],
    /// Stored as its transpose.
    pub transposed: bool,
}

impl<'d> Field<'d> {
    fn new(device: &'d dyn Device) -> Field<'d> {
        let build = |arena: &mut Arena| {
            let floats = arena.take(Purpose::Activations, Dtype::F32, FIELD);
            (floats, arena.take(Purpose::Activations, Dtype::F64, 3))
        };
        let mut counting = Arena::counting();
        build(&mut counting);
        let (floats, doubles) =
            build(&mut Arena::live(device, &counting.plan()).expect("little memory"));
        let (placed, outputs) = (RefCell::default(), RefCell::default());
        Field { device, floats, doubles, placed, used: Cell::new(0), outputs }
    }

    fn clear(&self) {
        self.used.set(0);
        self.placed.borrow_mut().clear();
        self.outputs.borrow_mut().clear();
    }

    /// The next `len` elements after a gap, all of them sentinels.
    fn room(&self, len: usize) -> Region {
        let start = self.used.get() + GAP;
        self.used.set(start + len);
        assert!(start + len + GAP <= FIELD, "a case larger than the field");
        let around = self.floats.slice(start - GAP..start + len + GAP);
        self.device.write_f32(&vec![SENTINEL; len + 2 * GAP], around);
        let region = self.floats.slice(start..start + len);
        self.placed.borrow_mut().push((region, start));
        region
    }

    pub fn floats(&self, values: &[f32]) -> Region {
        let region = self.room(values.len());
        self.device.write_f32(values, region);
        region
    }

    pub fn ints(&self, values: &[i32]) -> Region {
        let region = self.room(values.len()).cast(Dtype::I32);
        self.device.write_i32(values, region);
        region
    }

    /// A region of one double, between two others.
    pub fn double(&self, value: f64) -> Region {
        self.device.write_f64(&[1.5, value, 2.5], self.doubles);
        self.doubles.slice(1..2)
    }

    /// A matrix of these values, row by row as the kernel shall see them. Its margins are
    /// sentinels, and its region ends with its last element.
    pub fn matrix(&self, values: &[f32], [rows, cols]: [usize; 2], layout: Layout) -> Mat {
        assert_eq!(values.len(), rows * cols);
        let (stored_rows, stored_cols) =
            if layout.transposed { (cols, rows) } else { (rows, cols) };
        let [before, after] = layout.margins;
        let stride = before + stored_cols + after;
        let last = stored_rows.saturating_sub(1) * stride;
        let stored = if stored_rows == 0 { 0 } else { before + last + stored_cols };
        let mut image = vec![SENTINEL; stored];
        for i in 0..rows {
            for j in 0..cols {
                let (row, col) = if layout.transposed { (j, i) } else { (i, j) };
                image[before + row * stride + col] = values[i * cols + j];
            }
        }
        let region = self.floats(&image);
        let (rows, cols, transposed) = (stored_rows, stored_cols, layout.transposed);
        Mat { region, offset: before, rows, cols, stride, transposed }
    }

    /// Runs a kernel and checks that it writes to nothing but its outputs.
    pub fn call(&self, outputs: &[Mat], kernel: impl FnOnce(&dyn Device)) {
        let used = self.floats.first(self.used.get() + GAP);
        let image = || {
            let mut image = vec![0.0; used.len()];
            self.device.read_f32(used, &mut image);
            image
        };
        let before = image();
        kernel(self.device);
        let mut after = image();
        let mut bits = self.outputs.borrow_mut();
        for output in outputs.iter().filter(|output| !output.region.is_empty()) {
            let start = self.start(output.region);
            for at in elements(output) {
                let at = start + at;
                bits.push(after[at].to_bits());
                after[at] = before[at];
            }
        }
        let changed = (0..used.len()).find(|&i| before[i].to_bits() != after[i].to_bits());
        assert_eq!(changed, None, "the kernel wrote outside its outputs {outputs:?}");
        let mut around = [0.0; 3];
        self.device.read_f64(self.doubles, &mut around);
        assert!(around[0] == 0.0 || (around[0], around[2]) == (1.5, 2.5), "a double's neighbours");
        let double = around[1].to_bits();
        bits.extend([double as u32, (double >> 32) as u32]);
    }

    /// First element of an operand in the field.
    fn start(&self, region: Region) -> usize {
        let placed = self.placed.borrow();
        let known = placed.iter().find(|(known, _)| *known == region.cast(Dtype::F32));
        known.map(|(_, start)| *start).expect("an operand of this field")
    }

    pub fn values(&self, region: Region) -> Vec<f64> {
        let mut values = vec![0.0; region.len()];
        self.device.read_f32(region, &mut values);
        wide(&values)
    }

    /// The elements of a matrix that is not transposed, row by row.
    pub fn matrix_values(&self, matrix: Mat) -> Vec<f64> {
        let values = self.values(matrix.region);
        elements(&matrix).map(|at| values[at]).collect()
    }

    pub fn double_value(&self, region: Region) -> f64 {
        let mut value = [0.0];
        self.device.read_f64(region, &mut value);
        value[0]
    }
}

/// Places of a matrix's elements in its region, row by row as stored.
fn elements(matrix: &Mat) -> impl Iterator<Item = usize> + use<> {
    let Mat { offset, rows, cols, stride, .. } = *matrix;
    (0..rows).flat_map(move |i| (0..cols).map(move |j| offset + i * stride + j))
}

/// A region as a matrix of one row.
pub fn flat(region: Region) -> Mat {
    Mat::new(region, 1, region.len())
}

pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

pub fn abs(values: &[f64]) -> Vec<f64> {
    values.iter().map(|x| x.abs()).collect()
}

/// What an output holds before the call: with `Set` a NaN, so that a kernel which adds is found
/// out; and what its result adds to.
pub fn before(write: Write, numbers: &mut Numbers, n: usize) -> (Vec<f32>, Vec<f64>) {
    match write {
        Write::Set => (vec![SENTINEL; n], vec![0.0; n]),
        Write::Add => {
            let old = numbers.normals(n);
            let base = wide(&old);
            (old, base)
        }
    }
}

/// `a[i] + b[i]`.
pub fn sum(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// Compares element by element. Below 1e-30 a device may flush to zero.
pub fn assert_close(what: &str, got: &[f64], want: &[f64], tolerance: impl Fn(usize) -> f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let off = (got - want).abs();
        assert!(
            got == want || off <= tolerance(i) + 1e-30,
            "{what}[{i}] is {got}, not {want}: off by {off:.3e}, tolerance {:.3e}",
            tolerance(i)
        );
    }
}

/// Lengths of elementwise operands; the long ones make several tasks.
pub fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![1 => Just(0), 1 => Just(1), 8 => 1..=200_usize, 2 => 16_000..=40_000_usize]
}

/// Numbers of tokens.
pub fn heights() -> impl Strategy<Value = usize> {
    prop_oneof![1 => Just(0), 1 => Just(1), 8 => 1..=200_usize, 2 => 300..=700_usize]
}

/// Numbers of channels.
pub fn widths() -> impl Strategy<Value = usize> {
    prop_oneof![Just(1), Just(3), Just(40), Just(257), 1..=200_usize]
}

pub fn writes() -> impl Strategy<Value = Write> {
    prop_oneof![Just(Write::Set), Just(Write::Add)]
}

/// Contiguous or strided, not transposed.
pub fn layouts() -> impl Strategy<Value = Layout> {
    let margin = || prop_oneof![Just(0), Just(1), Just(24)];
    [margin(), margin()].prop_map(|margins| Layout { margins, transposed: false })
}

/// Contiguous or strided, either way round.
pub fn input_layouts() -> impl Strategy<Value = Layout> {
    (layouts(), any::<bool>()).prop_map(|(layout, transposed)| Layout { transposed, ..layout })
}

/// A strategy that picks one of a few values.
pub fn one_of<T: Clone + Debug + 'static>(values: &'static [T]) -> impl Strategy<Value = T> {
    proptest::sample::select(values)
}
