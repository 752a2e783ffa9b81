//! What every kernel must refuse: each operand of each kernel in turn too short, of a wrong type,
//! on memory of another device, without memory, or under an output.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rotifer_device::{
    Activation, AdamW, Arena, Attention, Device, Dtype, Mat, Norm, Purpose, Region, Rotary, Sgd,
    Stream, Write,
};

/// Tokens, channels and classes of all calls here.
const T: usize = 4;
const C: usize = 8;
/// Elements from one operand to the next: so far that one moved into another reaches no third.
const SLOT: usize = 1024;

/// What a kernel does with an operand.
#[derive(Clone, Copy, PartialEq)]
enum Role {
    Input,
    /// An input whose length is the kernel's, so that none is too short.
    Sized,
    Output,
    /// An output whose length is the kernel's.
    SizedOutput,
}

use Dtype::{F32, F64, I32};
use Role::{Input, Output, Sized, SizedOutput};

/// One operand: type, elements, role.
type Operand = (Dtype, usize, Role);

struct Kernel {
    name: &'static str,
    operands: &'static [Operand],
    call: fn(&dyn Device, &[Region]),
}

/// A matrix of all tokens and channels.
fn tokens(region: Region) -> Mat {
    Mat { region, ..Mat::new(region, T, C) }
}

const NORM: Norm = Norm::Layer { eps: 1e-5 };
const SILU: Activation = Activation::Silu;
const STREAM: Stream = Stream { seed: 1, stream: 2 };
const ROTARY: Rotary = Rotary { heads: 2, head_dim: 4, theta: 1e4, inverse: false };
const SGD: Sgd = Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.0, grad_scale: 1.0 };
const ADAMW: AdamW = AdamW {
    lr: 0.1,
    beta1: 0.9,
    beta2: 0.99,
    eps: 1e-8,
    weight_decay: 0.0,
    step: 1,
    grad_scale: 1.0,
};

/// One head of 8 channels, with both masks.
fn attention(documents: Region, lengths: Region) -> Attention {
    Attention {
        batch: 1,
        seq: T,
        heads: 1,
        kv_heads: 1,
        head_dim: C,
        scale: 1.0,
        documents: Some(documents),
        lengths: Some(lengths),
    }
}

const LINEAR: &[Kernel] = &[
    Kernel {
        name: "add",
        operands: &[(F32, 8, Input), (F32, 8, Output)],
        call: |device, r| device.add(r[0], r[1]),
    },
    Kernel {
        name: "copy",
        operands: &[(F32, 8, Input), (F32, 8, Output)],
        call: |device, r| device.copy(r[0], r[1]),
    },
    Kernel {
        name: "matmul",
        operands: &[(F32, T * C, Input), (F32, C * T, Input), (F32, T * T, Output)],
        call: |device, r| {
            let (a, b, c) = (tokens(r[0]), Mat::new(r[1], C, T), Mat::new(r[2], T, T));
            device.matmul(a, b, c, Write::Set);
        },
    },
    Kernel {
        name: "bias",
        operands: &[(F32, C, Input), (F32, T * C, Output)],
        call: |device, r| device.bias(r[0], tokens(r[1]), Write::Add),
    },
    Kernel {
        name: "bias_backward",
        operands: &[(F32, T * C, Input), (F32, C, Output)],
        call: |device, r| device.bias_backward(tokens(r[0]), r[1]),
    },
    Kernel {
        name: "norm",
        operands: &[
            (F32, T * C, Input),
            (F32, C, Input),
            (F32, C, Input),
            (F32, T * C, Output),
            (F32, 2 * T, Output),
        ],
        call: |device, r| device.norm(NORM, tokens(r[0]), r[1], r[2], tokens(r[3]), r[4]),
    },
    Kernel {
        name: "norm_backward",
        operands: &[
            (F32, T * C, Input),
            (F32, C, Input),
            (F32, 2 * T, Input),
            (F32, T * C, Input),
            (F32, T * C, Output),
            (F32, C, Output),
            (F32, C, Output),
        ],
        call: |device, r| {
            let (x, dy, dx) = (tokens(r[0]), tokens(r[3]), tokens(r[4]));
            device.norm_backward(NORM, x, r[1], r[2], dy, dx, Write::Set, r[5], r[6]);
        },
    },
];

const NONLINEAR: &[Kernel] = &[
    Kernel {
        name: "activation",
        operands: &[(F32, 8, Input), (F32, 8, Output)],
        call: |device, r| device.activation(SILU, r[0], r[1]),
    },
    Kernel {
        name: "activation_backward",
        operands: &[(F32, 8, Input), (F32, 8, Input), (F32, 8, Output)],
        call: |device, r| device.activation_backward(SILU, r[0], r[1], r[2]),
    },
    Kernel {
        name: "gated",
        operands: &[(F32, 8, Input), (F32, 8, Input), (F32, 8, Output)],
        call: |device, r| device.gated(SILU, r[0], r[1], r[2]),
    },
    Kernel {
        name: "gated_backward",
        operands: &[
            (F32, 8, Input),
            (F32, 8, Input),
            (F32, 8, Input),
            (F32, 8, Output),
            (F32, 8, Output),
        ],
        call: |device, r| device.gated_backward(SILU, r[0], r[1], r[2], r[3], r[4]),
    },
    Kernel {
        name: "attention",
        operands: &[
            (I32, T, Input),
            (I32, 1, Input),
            (F32, 3 * T * C, Input),
            (F32, T * C, Output),
            (F32, T, Output),
        ],
        call: |device, r| device.attention(&attention(r[0], r[1]), r[2], r[3], r[4]),
    },
    Kernel {
        name: "attention_backward",
        operands: &[
            (I32, T, Input),
            (I32, 1, Input),
            (F32, 3 * T * C, Input),
            (F32, T * C, Input),
            (F32, T, Input),
            (F32, T * C, Input),
            (F32, 3 * T * C, Output),
            (F32, T, Output),
        ],
        call: |device, r| {
            let shape = attention(r[0], r[1]);
            device.attention_backward(&shape, r[2], r[3], r[4], r[5], r[6], r[7]);
        },
    },
    Kernel {
        name: "rotary",
        operands: &[(I32, T, Input), (F32, T * C, Output)],
        call: |device, r| device.rotary(&ROTARY, r[0], tokens(r[1])),
    },
];

const TOKENS: &[Kernel] = &[
    Kernel {
        name: "embedding",
        operands: &[(I32, T, Input), (F32, T * C, Input), (F32, T * C, Output)],
        call: |device, r| device.embedding(r[0], tokens(r[1]), 0, tokens(r[2]), Write::Set),
    },
    Kernel {
        name: "embedding_backward",
        operands: &[(I32, T, Input), (F32, T * C, Input), (F32, T * C, Output)],
        call: |device, r| device.embedding_backward(r[0], tokens(r[1]), tokens(r[2]), 0),
    },
    Kernel {
        name: "loss_block",
        operands: &[(F32, T * C, Input), (I32, T, Input), (F32, 3 * T, Output)],
        call: |device, r| device.loss_block(tokens(r[0]), 0, r[1], r[2]),
    },
    Kernel {
        name: "loss_join",
        operands: &[(F32, 3 * T, Input), (F32, 3 * T, Sized)],
        call: |device, r| device.loss_join(r[0], r[1]),
    },
    Kernel {
        name: "loss_finish",
        operands: &[(F32, 3 * T, Input), (I32, T, Sized), (F32, T, Output), (F64, 1, Output)],
        call: |device, r| device.loss_finish(r[0], r[1], r[2], r[3]),
    },
    Kernel {
        name: "loss_backward",
        operands: &[(F32, T * C, Output), (I32, T, Input), (F32, T, Input)],
        call: |device, r| device.loss_backward(tokens(r[0]), 0, r[1], r[2], 1.0),
    },
];

const UPDATES: &[Kernel] = &[
    Kernel {
        name: "adamw",
        operands: &[(F32, 8, Output), (F32, 8, Input), (F32, 8, Output), (F32, 8, Output)],
        call: |device, r| device.adamw(&ADAMW, r[0], r[1], r[2], r[3]),
    },
    Kernel {
        name: "sgd",
        operands: &[(F32, 8, Output), (F32, 8, Input), (F32, 8, Output)],
        call: |device, r| device.sgd(&SGD, r[0], r[1], r[2]),
    },
    Kernel {
        name: "squared_norm",
        operands: &[(F32, 8, Sized), (F64, 1, Output)],
        call: |device, r| device.squared_norm(r[0], r[1]),
    },
    Kernel {
        name: "fill",
        operands: &[(F32, 8, SizedOutput)],
        call: |device, r| device.fill(r[0], 1.0),
    },
    Kernel {
        name: "normal",
        operands: &[(F32, 8, SizedOutput)],
        call: |device, r| device.normal(STREAM, 0, 0.0, 1.0, r[0]),
    },
    Kernel {
        name: "uniform",
        operands: &[(F32, 8, SizedOutput)],
        call: |device, r| device.uniform(STREAM, 0, 0.0, 1.0, r[0]),
    },
    Kernel {
        name: "dropout",
        operands: &[(F32, 8, Input), (F32, 8, Output)],
        call: |device, r| device.dropout(STREAM, 0, 0.5, r[0], r[1], Write::Set),
    },
    Kernel {
        name: "write_f32",
        operands: &[(F32, 8, Output)],
        call: |device, r| device.write_f32(&[1.0; 8], r[0]),
    },
    Kernel {
        name: "read_f32",
        operands: &[(F32, 8, Input)],
        call: |device, r| device.read_f32(r[0], &mut [0.0; 8]),
    },
    Kernel {
        name: "write_i32",
        operands: &[(I32, 8, Output)],
        call: |device, r| device.write_i32(&[1; 8], r[0]),
    },
    Kernel {
        name: "write_f64",
        operands: &[(F64, 8, Output)],
        call: |device, r| device.write_f64(&[1.0; 8], r[0]),
    },
    Kernel {
        name: "read_f64",
        operands: &[(F64, 8, Input)],
        call: |device, r| device.read_f64(r[0], &mut [0.0; 8]),
    },
];

/// Space for one call: a slot for each operand, in each type.
struct Slots {
    floats: Region,
    doubles: Region,
    halves: Region,
}

impl Slots {
    const NUM: usize = 8;

    fn of(arena: &mut Arena) -> Slots {
        let mut take = |dtype| arena.take(Purpose::Weights, dtype, Slots::NUM * SLOT);
        Slots { floats: take(F32), doubles: take(F64), halves: take(Dtype::Bf16) }
    }

    fn live(device: &dyn Device) -> Slots {
        let mut counting = Arena::counting();
        Slots::of(&mut counting);
        Slots::of(&mut Arena::live(device, &counting.plan()).expect("little memory"))
    }

    /// Room in slot `i`, `shift` elements from its start.
    fn at(&self, i: usize, dtype: Dtype, len: usize, shift: usize) -> Region {
        let range = i * SLOT + shift..i * SLOT + shift + len;
        match dtype {
            F64 => self.doubles.slice(range),
            Dtype::Bf16 => self.halves.slice(range),
            _ => self.floats.slice(range).cast(dtype),
        }
    }

    fn operands(&self, kernel: &Kernel) -> Vec<Region> {
        let operands = kernel.operands.iter().enumerate();
        operands.map(|(i, (dtype, len, _))| self.at(i, *dtype, *len, 0)).collect()
    }
}

/// `device` must refuse what it should; `stranger` is a device on memory of its own.
pub fn check_refusals(device: &dyn Device, stranger: &dyn Device) {
    let (slots, strange) = (Slots::live(device), Slots::live(stranger));
    let counted = Slots::of(&mut Arena::counting());
    let accepted = RefCell::new(Vec::new());
    for kernel in [LINEAR, NONLINEAR, TOKENS, UPDATES].into_iter().flatten() {
        let good = slots.operands(kernel);
        (kernel.call)(device, &good);
        let refuses = |i: usize, operand: Region, why: &str| {
            let mut regions = good.clone();
            regions[i] = operand;
            let call = || (kernel.call)(device, &regions);
            if catch_unwind(AssertUnwindSafe(call)).is_ok() {
                accepted.borrow_mut().push(format!("{} with operand {i} {why}", kernel.name));
            }
        };
        for (i, &(dtype, len, role)) in kernel.operands.iter().enumerate() {
            if role == Input || role == Output {
                refuses(i, good[i].first(len - 1), "too short");
            }
            // A copy takes any type, but not two.
            refuses(i, slots.at(i, Dtype::Bf16, len, 0), "of type bf16");
            refuses(i, strange.operands(kernel)[i], "on memory of another device");
            refuses(i, counted.operands(kernel)[i], "only counted");
            if role == Output {
                for (j, &(other, other_len, read)) in kernel.operands.iter().enumerate() {
                    let read = read == Input || read == Sized;
                    if read && other.bytes() == dtype.bytes() {
                        let under = slots.at(j, dtype, len, other_len / 2);
                        refuses(i, under, &format!("over operand {j}"));
                    }
                }
            }
        }
    }
    let accepted = accepted.into_inner();
    assert!(accepted.is_empty(), "accepted: {accepted:#?}");
}
