//! What the comparison with `reference` cannot see: that neither threads nor the instruction set
//! ever change a bit, and that broken operands are refused.

use super::*;
use crate::{Arena, Purpose};

/// Hands out regions of random numbers, and remembers them to compare.
struct Bench<'a> {
    device: &'a CpuDevice,
    arena: Arena,
    regions: Vec<Region>,
}

impl<'a> Bench<'a> {
    fn new(device: &'a CpuDevice) -> Bench<'a> {
        let mut counting = Arena::counting();
        counting.take(Purpose::Activations, Dtype::F32, 3 << 20);
        let arena = Arena::live(device, &counting.plan()).expect("little memory");
        Bench { device, arena, regions: Vec::new() }
    }

    fn floats(&mut self, len: usize) -> Region {
        let region = self.arena.take(Purpose::Activations, Dtype::F32, len);
        let stream = Stream { seed: 7, stream: self.regions.len() as u64 };
        self.device.normal(stream, 3, 0.0, 1.0, region);
        self.regions.push(region);
        region
    }

    fn mat(&mut self, rows: usize, cols: usize) -> Mat {
        let stride = cols + 5;
        let region = self.floats(rows * stride);
        Mat { region, offset: 0, rows, cols, stride, transposed: false }
    }

    fn ints(&mut self, len: usize, below: i32) -> Region {
        let region = self.arena.take(Purpose::Activations, Dtype::I32, len);
        let values: Vec<i32> = (0..len as i32).map(|i| i * 7 % below - 1).collect();
        self.device.write_i32(&values, region);
        region
    }

    /// Bits of everything handed out.
    fn bits(&self) -> Vec<u32> {
        let mut bits = Vec::new();
        for region in &self.regions {
            let mut values = vec![0.0; region.len()];
            self.device.read_f32(*region, &mut values);
            bits.extend(values.iter().map(|x| x.to_bits()));
        }
        bits
    }
}

type Kernels<'a> = &'a (dyn Fn(&CpuDevice, &mut Bench) + Sync);

fn bits_of(device: &CpuDevice, kernels: Kernels) -> Vec<u32> {
    let mut bench = Bench::new(device);
    kernels(device, &mut bench);
    bench.bits()
}

/// Runs `kernels` on 1, 2 and 3 threads and compares all floats in the end.
fn threads_agree(kernels: Kernels) {
    let run = |threads| {
        CpuDevice::run(threads, |device| bits_of(device, kernels)).expect("a few threads")
    };
    let one = run(1);
    assert!(one.iter().all(|bits| f32::from_bits(*bits).is_finite()));
    assert!(one == run(2) && one == run(3));
}

/// As [`threads_agree`], and for each instruction set that this machine has.
fn all_agree(kernels: Kernels) {
    threads_agree(kernels);
    let best = bits_of(&CpuDevice::new(1), kernels);
    let mut sets = vec![pulp::Arch::Scalar];
    #[cfg(target_arch = "x86_64")]
    sets.extend(pulp::x86::V3::try_new().map(pulp::Arch::V3));
    for arch in sets {
        let device = CpuDevice { team: Team { arch, threads: 1 }, ..CpuDevice::new(1) };
        assert!(best == bits_of(&device, kernels), "{arch:?}");
    }
}

fn products(device: &CpuDevice, bench: &mut Bench, shapes: &[(usize, usize, usize)]) {
    for &(m, n, k) in shapes {
        let (a, b, c) = (bench.mat(m, k), bench.mat(n, k).t(), bench.mat(m, n));
        device.matmul(a, b, c, Write::Add);
        let (a, b) = (bench.mat(k, m).t(), bench.mat(k, n));
        device.matmul(a, b, c, Write::Add);
    }
}

#[test]
fn matmul_does_not_depend_on_threads_or_vectors() {
    all_agree(&|device, bench| {
        products(device, bench, &[(130, 260, 300), (650, 43, 70), (13, 17, 31)]);
    });
    // Of few rows the instruction set does decide: dot products have one partial sum per lane.
    threads_agree(&|device, bench| {
        products(device, bench, &[(3, 700, 900), (5, 1300, 300), (14, 10, 9000)]);
    });
}

/// A shard's columns are those of the whole product, which is what makes column-cut layers exact.
#[test]
fn matmul_does_not_depend_on_its_cut() {
    let device = CpuDevice::new(1);
    let mut bench = Bench::new(&device);
    let (m, n, k) = (61, 203, 520);
    let (a, b) = (bench.mat(m, k), bench.mat(n, k));
    let (whole, cut) = (bench.mat(m, n), bench.mat(m, n));
    device.copy(whole.region, cut.region);
    device.matmul(a, b.t(), whole, Write::Set);
    for (start, end) in [(0, 67), (67, 135), (135, 203)] {
        device.matmul(a, b.rows(start..end).t(), cut.columns(start..end), Write::Set);
    }
    let read = |mat: Mat| {
        let mut values = vec![0.0; mat.region.len()];
        device.read_f32(mat.region, &mut values);
        values
    };
    assert_eq!(read(whole), read(cut));
}

#[test]
fn norm_and_bias_do_not_depend_on_threads_or_vectors() {
    all_agree(&|device, bench| {
        let (t, c) = (150, 300);
        let (w, b, stats) = (bench.floats(c), bench.floats(c), bench.floats(2 * t));
        let (x, y, dx) = (bench.mat(t, c), bench.mat(t, c), bench.mat(t, c));
        for norm in [Norm::Layer { eps: 1e-5 }, Norm::Rms { eps: 1e-5 }] {
            let (dw, db) = (bench.floats(c), bench.floats(c));
            device.norm(norm, x, w, b, y, stats);
            device.norm_backward(norm, x, w, stats, y, dx, Write::Add, dw, db);
            device.norm_backward(norm, x, w, stats, dx, dx, Write::Set, dw, db);
        }
        device.bias_backward(dx, b);
        device.bias(b, y, Write::Add);
    });
}

#[test]
fn elementwise_kernels_do_not_depend_on_threads_or_vectors() {
    all_agree(&|device, bench| {
        let n = 70_001;
        let [x, y, z, u] = [0; 4].map(|_| bench.floats(n));
        for f in [Activation::GeluTanh, Activation::GeluErf, Activation::Silu] {
            device.activation(f, x, y);
            device.activation_backward(f, x, y, y);
            device.gated(f, x, y, z);
            device.gated_backward(f, x, y, z, u, z);
        }
        let stream = Stream { seed: 1, stream: 2 };
        device.dropout(stream, 77, 0.3, z, u, Write::Add);
        device.uniform(stream, 5, -1.0, 1.0, x);
        device.gated(Activation::Silu, x, u, u);
        device.activation(Activation::Silu, z, z);
        let step = AdamW {
            lr: 1e-2,
            beta1: 0.9,
            beta2: 0.99,
            eps: 1e-8,
            weight_decay: 0.1,
            step: 2,
            grad_scale: 0.5,
        };
        device.dropout(stream, 0, 0.0, x, z, Write::Set);
        device.gated(Activation::GeluErf, z, z, z);
        device.fill(u, 0.25);
        device.adamw(&step, x, y, z, u);
        device.sgd(&Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.01, grad_scale: 2.0 }, x, y, z);
        device.add(x, u);
        let sum = bench.arena.take(Purpose::Activations, Dtype::F64, 1);
        device.squared_norm(u, sum);
        let mut total = [0.0];
        device.read_f64(sum, &mut total);
        device.fill(y.first(1), total[0] as f32);
    });
}

#[test]
fn attention_does_not_depend_on_threads_or_vectors() {
    all_agree(&|device, bench| {
        let (batch, seq, heads, kv_heads, head_dim) = (2, 150, 4, 2, 24);
        let shape = Attention {
            batch,
            seq,
            heads,
            kv_heads,
            head_dim,
            scale: 0.2,
            documents: None,
            lengths: None,
        };
        let (tokens, width) = (batch * seq, shape.qkv_width());
        let (qkv, dqkv) = (bench.floats(tokens * width), bench.floats(tokens * width));
        let (lse, delta) = (bench.floats(tokens * heads), bench.floats(tokens * heads));
        let [y, dy] = [0; 2].map(|_| bench.floats(tokens * heads * head_dim));
        let positions = bench.ints(tokens, 1 << 17);
        let rotary = Rotary { heads: heads + kv_heads, head_dim, theta: 1e4, inverse: false };
        device.rotary(&rotary, positions, Mat::new(qkv, tokens, width));
        device.attention(&shape, qkv, y, lse);
        device.attention_backward(&shape, qkv, y, lse, dy, dqkv, delta);
    });
}

#[test]
fn embedding_and_loss_do_not_depend_on_threads_or_vectors() {
    all_agree(&|device, bench| {
        let (t, c, v) = (120, 70, 3000);
        let (table, y, dtable) = (bench.mat(50, c), bench.mat(t, c), bench.mat(50, c));
        let ids = bench.ints(t, 60);
        device.embedding(ids, table, 2, y, Write::Add);
        device.embedding_backward(ids, y, dtable, 2);
        let (logits, targets) = (bench.mat(t, v), bench.ints(t, v as i32));
        let (state, lse) = (bench.floats(3 * t), bench.floats(t));
        device.write_f32(&[-1e30, 0.0, 0.0].repeat(t), state);
        let loss = bench.arena.take(Purpose::Activations, Dtype::F64, 1);
        device.loss_block(logits, 0, targets, state);
        device.loss_finish(state, targets, lse, loss);
        device.loss_backward(logits, 0, targets, lse, 0.1);
        let mut total = [0.0];
        device.read_f64(loss, &mut total);
        device.fill(lse.first(1), total[0] as f32);
    });
}

#[test]
#[should_panic(expected = "a kernel wants F32, not Bf16[8]")]
fn floats_of_another_type_are_refused() {
    let device = CpuDevice::new(1);
    let mut counting = Arena::counting();
    counting.take(Purpose::Weights, Dtype::Bf16, 8);
    let mut arena = Arena::live(&device, &counting.plan()).expect("little memory");
    let x = arena.take(Purpose::Weights, Dtype::Bf16, 8);
    device.activation(Activation::Silu, x, x);
}

#[test]
#[should_panic(expected = "an output overlaps an input in part")]
fn outputs_that_overlap_inputs_are_refused() {
    let device = CpuDevice::new(1);
    let mut bench = Bench::new(&device);
    let x = bench.floats(100);
    device.activation(Activation::Silu, x.slice(0..60), x.slice(30..90));
}

#[test]
#[should_panic(expected = "is not memory of this device")]
fn memory_of_others_is_refused() {
    let (one, other) = (CpuDevice::new(1), CpuDevice::new(1));
    let x = Bench::new(&one).floats(10);
    other.fill(x, 1.0);
}
