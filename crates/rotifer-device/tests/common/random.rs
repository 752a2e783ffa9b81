//! What the random generator promises. It has no twin: which numbers it makes is its own business.

use proptest::prelude::*;
use rotifer_device::{Device, Region, Stream, Write, reference};

use super::numbers::Numbers;
use super::*;

const STREAM: Stream = Stream { seed: 1234, stream: 5 };
/// Numbers in a test of their distribution.
const MANY: usize = 200_000;

/// Kernels that fill a region from an index on.
type Fill = fn(&dyn Device, Stream, u64, Region);

const FILLS: &[Fill] = &[
    |device, stream, first, x| device.normal(stream, first, 0.5, 2.0, x),
    |device, stream, first, x| device.uniform(stream, first, -3.0, 5.0, x),
    |device, stream, first, x| {
        device.fill(x, 1.0);
        device.dropout(stream, first, 0.3, x, x, Write::Set);
    },
];

pub fn check_pieces_equal_the_whole(devices: &[&dyn Device]) {
    let firsts = one_of(&[0_u64, 1, 63, 1_000_001, (1 << 40) + 17]);
    let cuts = proptest::collection::vec(0.0..1.0_f64, 0..=4);
    for_all(devices, (lengths(), firsts, cuts, any::<u64>()), |field, (n, first, cuts, seed)| {
        let stream = Stream { seed: *seed, stream: seed.rotate_left(23) };
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| (cut * *n as f64) as usize).collect();
        cuts.extend([0, *n]);
        cuts.sort_unstable();
        for fill in FILLS {
            let [whole, parts] = [(); 2].map(|()| field.floats(&vec![f32::NAN; *n]));
            field.call(&[flat(whole)], |device| fill(device, stream, *first, whole));
            field.call(&[flat(parts)], |device| {
                for cut in cuts.windows(2) {
                    fill(device, stream, first + cut[0] as u64, parts.slice(cut[0]..cut[1]));
                }
            });
            assert_eq!(field.values(whole), field.values(parts));
        }
    });
}

fn draw(field: &Field<'_>, stream: Stream, fill: Fill) -> Vec<f64> {
    field.clear();
    let x = field.floats(&vec![f32::NAN; MANY]);
    field.call(&[flat(x)], |device| fill(device, stream, 0, x));
    field.values(x)
}

/// Correlation of two series of independent numbers: below 5 / sqrt(n), 5 sigma.
fn assert_uncorrelated(what: &str, a: &[f64], b: &[f64]) {
    let mean = |x: &[f64]| x.iter().sum::<f64>() / x.len() as f64;
    let (mean_a, mean_b) = (mean(a), mean(b));
    let moment = |f: &dyn Fn(f64, f64) -> f64| -> f64 {
        a.iter().zip(b).map(|(a, b)| f(a - mean_a, b - mean_b)).sum()
    };
    let spread = (moment(&|a, _| a * a) * moment(&|_, b| b * b)).sqrt();
    let correlation = moment(&|a, b| a * b) / spread;
    assert!(correlation.abs() < 5.0 / (a.len() as f64).sqrt(), "{what}: {correlation}");
}

pub fn check_streams_are_independent(device: &dyn Device) {
    let field = Field::new(device);
    let others = [
        Stream { seed: STREAM.seed + 1, ..STREAM },
        Stream { stream: STREAM.stream + 1, ..STREAM },
        Stream { seed: STREAM.stream, stream: STREAM.seed },
        Stream { seed: STREAM.seed + (1 << 32), ..STREAM },
        Stream { stream: STREAM.stream + (1 << 32), ..STREAM },
    ];
    for fill in &FILLS[..2] {
        let x = draw(&field, STREAM, *fill);
        for other in others {
            let y = draw(&field, other, *fill);
            assert_uncorrelated(&format!("{STREAM:?} and {other:?}"), &x, &y);
        }
        for lag in [1, 2, 3, 4, 64] {
            assert_uncorrelated(&format!("lag {lag}"), &x[lag..], &x[..MANY - lag]);
        }
    }
}

/// Counts in 64 bins of equal probability: chi-squared with 63 degrees of freedom has mean 63 and
/// standard deviation 11.2, and is below 130, 6 sigma, for all but one stream in 10^6.
fn assert_even(what: &str, quantiles: impl Iterator<Item = f64>) {
    let mut counts = [0.0; 64];
    quantiles.for_each(|q| counts[((q * 64.0) as usize).min(63)] += 1.0);
    let expected = counts.iter().sum::<f64>() / 64.0;
    let chi_squared: f64 = counts.iter().map(|n| (n - expected) * (n - expected) / expected).sum();
    assert!(chi_squared < 130.0, "{what}: {chi_squared}");
}

pub fn check_normal_distribution(device: &dyn Device) {
    let field = Field::new(device);
    let x =
        draw(&field, STREAM, |device, stream, first, x| device.normal(stream, first, 0.0, 1.0, x));
    let moment = |power| x.iter().map(|x| x.powi(power)).sum::<f64>() / MANY as f64;
    // Moments 1 to 4 of n standard normal numbers have these deviations over the root of n.
    for (power, want, deviation) in
        [(1, 0.0, 1.0), (2, 1.0, 2_f64.sqrt()), (3, 0.0, 15_f64.sqrt()), (4, 3.0, 96_f64.sqrt())]
    {
        let off = (moment(power) - want).abs();
        assert!(
            off < 5.0 * deviation / (MANY as f64).sqrt(),
            "moment {power} is {}",
            moment(power)
        );
    }
    // The GELU's gate is the normal distribution function.
    let gelu = |x: f64| reference::activation(rotifer_device::Activation::GeluErf, x);
    assert_even("normal", x.iter().filter(|x| **x != 0.0).map(|x| gelu(*x) / x));
    // Beyond 4 sigma lie 6.3e-5 of them: 12.7 expected, 5 sigma of a Poisson variable is 18.
    let tail = x.iter().filter(|x| x.abs() > 4.0).count();
    assert!((1..=31).contains(&tail), "{tail} numbers beyond 4 sigma");
    let moved = draw(&field, STREAM, |device, stream, first, x| {
        device.normal(stream, first, -2.0, 0.02, x)
    });
    let want: Vec<f64> = x.iter().map(|x| 0.02_f32 as f64 * x - 2.0).collect();
    assert_close("normal", &moved, &want, |i| 2.0 * UNIT * (2.0 + want[i].abs()));
}

pub fn check_uniform_distribution(device: &dyn Device) {
    let field = Field::new(device);
    let x =
        draw(&field, STREAM, |device, stream, first, x| device.uniform(stream, first, 0.0, 1.0, x));
    assert!(x.iter().all(|x| (0.0..1.0).contains(x)));
    assert_even("uniform", x.iter().copied());
    let narrow = |device: &dyn Device, stream: Stream, first: u64, x: Region| {
        // Rounded to nearest, a sixth of these would be 1 + 2^-22, which is out of range.
        device.uniform(stream, first, 1.0, 1.0 + 2.0 * f32::EPSILON, x);
    };
    let high = 1.0 + 2.0 * f64::from(f32::EPSILON);
    assert!(draw(&field, STREAM, narrow).iter().all(|x| (1.0..high).contains(x)));
    let wide = draw(&field, STREAM, |device, stream, first, x| {
        device.uniform(stream, first, -3.0, 5.0, x)
    });
    let want: Vec<f64> = x.iter().map(|x| 8.0 * x - 3.0).collect();
    assert_close("uniform", &wide, &want, |_| 8.0 * UNIT);
}

pub fn check_dropout(devices: &[&dyn Device]) {
    let rates = one_of(&[0.0_f32, 0.1, 0.5, 0.9]);
    let how = (writes(), any::<bool>());
    for_all(devices, (lengths(), rates, how, any::<u64>()), |field, (n, p, how, seed)| {
        let (write, in_place) = *how;
        let (stream, first) = (Stream { seed: *seed, stream: 3 }, seed % 1000);
        let numbers = &mut Numbers::new(*seed);
        let (x, (old, base)) = (numbers.normals(*n), before(write, numbers, *n));
        let (x_at, uniform_at) = (field.floats(&x), field.floats(&old));
        let in_place = in_place && write == Write::Set;
        let y_at = if in_place { x_at } else { field.floats(&old) };
        field.call(&[flat(y_at)], |device| device.dropout(stream, first, *p, x_at, y_at, write));
        field.call(&[flat(uniform_at)], |device| {
            device.uniform(stream, first, 0.0, 1.0, uniform_at)
        });
        let mut uniform = vec![0.0; *n];
        field.device.read_f32(uniform_at, &mut uniform);
        let kept = |(x, u): (&f32, &f32)| reference::dropout(*p, *u, f64::from(*x));
        let kept: Vec<f64> = x.iter().zip(&uniform).map(kept).collect();
        let want = sum(&kept, &base);
        let tolerance = |i: usize| UNIT * (3.0 * kept[i].abs() + want[i].abs());
        assert_close("y", &field.values(y_at), &want, tolerance);
    });
}

/// The share of kept elements, and that backward, being the same call, drops the same ones.
pub fn check_dropout_rate(device: &dyn Device) {
    let field = Field::new(device);
    for p in [0.1_f32, 0.5, 0.9] {
        field.clear();
        let (ones, dy) = (field.floats(&[1.0; MANY]), field.floats(&[-3.0; MANY]));
        for x in [ones, dy] {
            field.call(&[flat(x)], |device| device.dropout(STREAM, 9, p, x, x, Write::Set));
        }
        let (y, dx) = (field.values(ones), field.values(dy));
        assert!(y.iter().zip(&dx).all(|(y, dx)| (*y == 0.0) == (*dx == 0.0)));
        let (kept, p) = (y.iter().filter(|y| **y != 0.0).count() as f64, f64::from(p));
        let deviation = (MANY as f64 * p * (1.0 - p)).sqrt();
        let expected = MANY as f64 * (1.0 - p);
        assert!((kept - expected).abs() < 5.0 * deviation, "{kept} of {MANY} kept at rate {p}");
    }
}
