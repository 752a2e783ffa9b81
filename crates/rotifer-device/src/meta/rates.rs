//! How fast a device's kernels are.

use std::sync::Arc;

use crate::{KernelKind, Mat};

/// How fast the kernels of one rank's device are: what a [`MetaDevice`](crate::MetaDevice) counts
/// time by.
#[derive(Clone, Debug, PartialEq)]
pub struct Rates {
    /// Seconds of any kernel, whatever it does.
    pub kernel_secs: f64,
    /// Products of matrices.
    pub matmul: MatmulRates,
    /// Attention, in operations per second.
    pub attention_flops: f64,
    /// Every other kind, in bytes read and written per second, by `KernelKind as usize`.
    pub bytes_per_sec: [f64; KernelKind::ALL.len()],
}

/// How fast products are.
#[derive(Clone, Debug, PartialEq)]
pub enum MatmulRates {
    /// From a data sheet: by operations, or by bytes where these take longer.
    Peak {
        /// Operations per second.
        flops: f64,
        /// Bytes read and written per second.
        bytes_per_sec: f64,
    },
    /// From measurements.
    Table(Arc<MatmulTable>),
}

/// Which operands of a product are read as their transposes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatmulForm {
    /// `a b`: the gradient of an input.
    Plain,
    /// `a b^T`: a layer's forward.
    SecondTransposed,
    /// `a^T b`: the gradient of weights. (Both transposed counts as this.)
    FirstTransposed,
}

impl MatmulForm {
    /// All forms, in the order of a [`MatmulTable`].
    pub const ALL: [MatmulForm; 3] =
        [MatmulForm::Plain, MatmulForm::SecondTransposed, MatmulForm::FirstTransposed];

    pub(super) const fn of(a: &Mat, b: &Mat) -> MatmulForm {
        match (a.transposed, b.transposed) {
            (false, false) => MatmulForm::Plain,
            (false, true) => MatmulForm::SecondTransposed,
            (true, _) => MatmulForm::FirstTransposed,
        }
    }
}

/// Operations per second of products, measured on a grid of sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct MatmulTable {
    sizes: Vec<usize>,
    flops: Vec<f64>,
}

impl MatmulTable {
    /// A table of the rates `flops[form][m][k][n]` (row-major) of `[m, k]` times `[k, n]`, where
    /// m, k and n each take the values `sizes`. `None` if `sizes` is not ascending from 1 or more,
    /// or there is not one positive rate for each product.
    #[must_use]
    pub fn new(sizes: Vec<usize>, flops: Vec<f64>) -> Option<MatmulTable> {
        let ascending = sizes.first()? > &0 && sizes.is_sorted_by(|a, b| a < b);
        let complete = flops.len() == MatmulForm::ALL.len() * sizes.len().pow(3);
        let positive = flops.iter().all(|rate| rate.is_finite() && *rate > 0.0);
        (ascending && complete && positive).then_some(MatmulTable { sizes, flops })
    }

    /// The rate of `[m, k]` times `[k, n]`: between measured sizes by interpolation over their
    /// logarithms, beyond them that of the nearest.
    fn rate(&self, form: MatmulForm, shape: [usize; 3]) -> f64 {
        let corners = shape.map(|size| self.place(size));
        let count = self.sizes.len();
        let mut log_rate = 0.0;
        for corner in 0..8_usize {
            let mut weight = 1.0;
            let mut at = form as usize;
            for (axis, (below, upward)) in corners.iter().enumerate() {
                let up = corner >> axis & 1 == 1;
                weight *= if up { *upward } else { 1.0 - upward };
                at = at * count + (below + usize::from(up)).min(count - 1);
            }
            log_rate += weight * self.flops[at].ln();
        }
        log_rate.exp()
    }

    /// The measured size at or below this one, and how far it is to the next, from 0 to 1.
    fn place(&self, size: usize) -> (usize, f64) {
        let above = self.sizes.partition_point(|known| *known <= size);
        match (above.checked_sub(1), self.sizes.get(above)) {
            (None, _) => (0, 0.0),
            (Some(below), None) => (below, 0.0),
            (Some(below), Some(next)) => {
                let [low, here, high] = [self.sizes[below], size, *next].map(|n| (n as f64).ln());
                (below, (here - low) / (high - low))
            }
        }
    }
}

impl Rates {
    /// One operation and one byte per second and nothing else: seconds on this device are amounts
    /// of work.
    #[must_use]
    pub const fn counting() -> Rates {
        let matmul = MatmulRates::Peak { flops: 1.0, bytes_per_sec: f64::INFINITY };
        let bytes_per_sec = [1.0; KernelKind::ALL.len()];
        Rates { kernel_secs: 0.0, matmul, attention_flops: 1.0, bytes_per_sec }
    }

    /// Rates from a data sheet: operations, and bytes of memory, per second.
    #[must_use]
    pub const fn peak(flops: f64, bytes_per_sec: f64, kernel_secs: f64) -> Rates {
        let matmul = MatmulRates::Peak { flops, bytes_per_sec };
        let bytes_per_sec = [bytes_per_sec; KernelKind::ALL.len()];
        Rates { kernel_secs, matmul, attention_flops: flops, bytes_per_sec }
    }

    pub(super) fn matmul_secs(&self, form: MatmulForm, shape: [usize; 3]) -> f64 {
        let [m, k, n] = shape.map(|size| size as f64);
        let work = 2.0 * m * k * n;
        let secs = match &self.matmul {
            MatmulRates::Peak { flops, bytes_per_sec } => {
                let bytes = 4.0 * (m * k + k * n + m * n);
                (work / flops).max(bytes / bytes_per_sec)
            }
            MatmulRates::Table(_) if work == 0.0 => 0.0,
            MatmulRates::Table(table) => work / table.rate(form, shape),
        };
        self.kernel_secs + secs
    }

    pub(super) fn attention_secs(&self, flops: f64) -> f64 {
        self.kernel_secs + flops / self.attention_flops
    }

    pub(super) fn streaming_secs(&self, kind: KernelKind, bytes: f64) -> f64 {
        self.kernel_secs + bytes / self.bytes_per_sec[kind as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rates that are a product of powers of the sizes are lines over logarithms, so the table
    /// must give them exactly.
    #[test]
    fn rates_between_measured_sizes_are_interpolated() {
        let law = |m: f64, k: f64, n: f64| 1e9 * m.powf(0.1) * k.powf(0.2) * n.powf(0.3);
        let sizes = [16_usize, 64, 256];
        let mut flops = Vec::new();
        for form in 0..3 {
            for m in sizes {
                for k in sizes {
                    for n in sizes {
                        flops.push(f64::from(form + 1) * law(m as f64, k as f64, n as f64));
                    }
                }
            }
        }
        let table = MatmulTable::new(sizes.into(), flops).expect("a whole table");
        for (form, factor) in MatmulForm::ALL.into_iter().zip([1.0, 2.0, 3.0]) {
            for [m, k, n] in [[16, 16, 16], [20, 100, 255], [256, 16, 63], [256, 256, 256]] {
                let expected = factor * law(m as f64, k as f64, n as f64);
                let rate = table.rate(form, [m, k, n]);
                assert!((rate / expected - 1.0).abs() < 1e-12, "{m} {k} {n}: {rate} {expected}");
            }
            assert_eq!(table.rate(form, [1, 1000, 3]), table.rate(form, [16, 256, 16]));
        }
    }

    #[test]
    fn tables_with_holes_are_refused() {
        assert!(MatmulTable::new(vec![16, 64], vec![1.0; 24]).is_some());
        assert!(MatmulTable::new(vec![16, 64], vec![1.0; 23]).is_none());
        assert!(MatmulTable::new(vec![64, 16], vec![1.0; 24]).is_none());
        assert!(MatmulTable::new(vec![0, 16], vec![1.0; 24]).is_none());
        assert!(MatmulTable::new(vec![], vec![]).is_none());
        assert!(MatmulTable::new(vec![16], vec![1.0, 0.0, 1.0]).is_none());
    }
}
