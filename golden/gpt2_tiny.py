#!/usr/bin/env python3
"""Writes the GPT-2 goldens: what PyTorch's autograd and AdamW say about a tiny model.

    python3 golden/gpt2_tiny.py            # writes golden/*.safetensors
    python3 golden/gpt2_tiny.py --check    # compares with the committed files instead

Everything is computed in float64 and only then rounded to float32, so a golden is the true value
to within half a unit in the last place, and the whole error of a comparison belongs to the float32
code under test. The initial weights are rounded to float32 *before* the float64 run: they are exact
inputs, not a source of error.

The model is written out by hand (layer norm, softmax, gelu), so that this file is a readable
statement of GPT-2's equations; autograd supplies the gradients. Names and layouts are those of
Hugging Face's GPT2LMHeadModel: the four Conv1D weights of a block are [in, out], lm_head is
[vocab, width].
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import zlib

import torch
from safetensors import safe_open
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).resolve().parent

# No size of the model divides by 7, heads and vocabulary by none of 2, 3, 4, 7; the MLP is not
# four times the width, the sequence is shorter than the context, and the rows of the batch do not
# share out evenly either. head_dim is 16, the smallest that the attention kernels promise.
VOCAB, WIDTH, HEADS, CONTEXT, MLP_WIDTH = 131, 80, 5, 24, 100
LAYERS_MAX = 2
ROWS, SEQ = 5, 19
NORM_EPS = 1e-5
IGNORED = -1
# Ignored targets of each row: with unequal numbers, a mean of per-row (or per-rank) means is not
# the mean over all targets, and a loss that confuses the two fails.
IGNORED_PER_ROW = (0, 3, 7, 1, 12)

STEPS = 10
# Every step is clipped, the first ones hard, except the tenth of the untied models: it is below the
# limit and must be left alone.
CLIP_NORM = 0.5
ADAMW = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
WEIGHT_DECAY = 0.1


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    layers: int
    tied: bool
    gelu: str  # "tanh" or "erf"


CASES = (
    Case("tied", layers=1, tied=True, gelu="tanh"),
    Case("untied", layers=LAYERS_MAX, tied=False, gelu="tanh"),
    Case("untied_erf", layers=1, tied=False, gelu="erf"),
)


def shapes(layers, tied):
    """The parameters of a model, by Hugging Face name."""
    c, f = WIDTH, MLP_WIDTH
    norm = {"weight": (c,), "bias": (c,)}

    def conv1d(inputs, outputs):
        return {"weight": (inputs, outputs), "bias": (outputs,)}

    parts = {
        "transformer.wte": {"weight": (VOCAB, c)},
        "transformer.wpe": {"weight": (CONTEXT, c)},
    }
    for i in range(layers):
        h = f"transformer.h.{i}"
        parts |= {
            f"{h}.ln_1": norm,
            f"{h}.attn.c_attn": conv1d(c, 3 * c),
            f"{h}.attn.c_proj": conv1d(c, c),
            f"{h}.ln_2": norm,
            f"{h}.mlp.c_fc": conv1d(c, f),
            f"{h}.mlp.c_proj": conv1d(f, c),
        }
    parts["transformer.ln_f"] = norm
    if not tied:
        parts["lm_head"] = {"weight": (VOCAB, c)}
    return {f"{part}.{leaf}": s for part, leaves in parts.items() for leaf, s in leaves.items()}


def initial(name, shape):
    """A float32 value that depends on the name alone, so that all cases share one weights file.

    Larger than a real model's initial values, and random where those are constant: with zero
    biases and unit norms, a bias or a norm weight that is never applied would pass unnoticed.
    """
    g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    value = 0.15 * torch.randn(shape, generator=g, dtype=torch.float64)
    if "ln_" in name and name.endswith("weight"):
        value += 1.0
    return value.float()


def batch():
    """Inputs and targets, int64 [ROWS, SEQ]; targets are the next token, or IGNORED."""
    g = torch.Generator().manual_seed(19)
    tokens = torch.randint(VOCAB, (ROWS, SEQ + 1), generator=g)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    for row, num_ignored in enumerate(IGNORED_PER_ROW):
        targets[row, torch.randperm(SEQ, generator=g)[:num_ignored]] = IGNORED
    return inputs, targets


def layer_norm(x, w, name):
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + NORM_EPS).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def conv1d(x, w, name):
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def gelu(x, kind):
    if kind == "erf":
        return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def attention(x, w, name):
    rows, seq, _ = x.shape
    heads = conv1d(x, w, f"{name}.c_attn").view(rows, seq, 3, HEADS, WIDTH // HEADS)
    q, k, v = heads.permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
    future = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    y = scores.masked_fill(future, -math.inf).softmax(-1) @ v
    return conv1d(y.transpose(1, 2).reshape(rows, seq, WIDTH), w, f"{name}.c_proj")


def logits_of(case, w, inputs):
    x = w["transformer.wte.weight"][inputs] + w["transformer.wpe.weight"][: inputs.shape[1]]
    for i in range(case.layers):
        h = f"transformer.h.{i}"
        x = x + attention(layer_norm(x, w, f"{h}.ln_1"), w, f"{h}.attn")
        hidden = gelu(conv1d(layer_norm(x, w, f"{h}.ln_2"), w, f"{h}.mlp.c_fc"), case.gelu)
        x = x + conv1d(hidden, w, f"{h}.mlp.c_proj")
    head = w["transformer.wte.weight" if case.tied else "lm_head.weight"]
    return layer_norm(x, w, "transformer.ln_f") @ head.T


def loss_of(logits, targets):
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED
    )


def adamw(w):
    """Matrices decay (both embeddings and the head among them); biases and norms do not."""
    matrices = [p for p in w.values() if p.dim() == 2]
    vectors = [p for p in w.values() if p.dim() == 1]
    groups = [
        dict(params=matrices, weight_decay=WEIGHT_DECAY),
        dict(params=vectors, weight_decay=0.0),
    ]
    return torch.optim.AdamW(groups, **ADAMW)


def run(case, initial_weights):
    """All goldens of a case, by tensor name."""
    names = shapes(case.layers, case.tied)
    w = {n: initial_weights[n].double().requires_grad_() for n in names}
    inputs, targets = batch()
    optimizer = adamw(w)
    out = {"inputs": inputs.int(), "targets": targets.int()}
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        logits = logits_of(case, w, inputs)
        loss = loss_of(logits, targets)
        loss.backward()
        if step == 0:
            out |= {"logits": logits.detach().float(), "loss": loss.detach().float().view(1)}
            out |= {f"grad.{n}": p.grad.float() for n, p in w.items()}
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(w.values(), CLIP_NORM).item())
        optimizer.step()
    num_clipped = sum(n > CLIP_NORM for n in norms)
    assert num_clipped >= STEPS - 1, f"{case.name}: clipping hardly bites: {norms}"
    out["train.losses"] = torch.tensor(losses, dtype=torch.float64).float()
    out["train.grad_norms"] = torch.tensor(norms, dtype=torch.float64).float()
    return out


def about(case):
    """The metadata of a file: one key, because safetensors writes several in no fixed order."""
    facts = dict(torch=torch.__version__.split("+")[0], script="golden/gpt2_tiny.py")
    model = dict(
        vocab=VOCAB, width=WIDTH, heads=HEADS, context=CONTEXT, mlp_width=MLP_WIDTH,
        layers=case.layers if case else LAYERS_MAX, norm_eps=NORM_EPS,
    )  # fmt: skip
    facts["model"] = model
    if case:
        model |= dict(tied=case.tied, gelu=case.gelu)
        facts["ignored_target"] = IGNORED
        facts["train"] = dict(
            steps=STEPS, clip_norm=CLIP_NORM, lr=ADAMW["lr"], beta1=ADAMW["betas"][0],
            beta2=ADAMW["betas"][1], eps=ADAMW["eps"], weight_decay=WEIGHT_DECAY,
        )  # fmt: skip
    return {"golden": json.dumps(facts)}


def differences(path, tensors):
    """What is wrong with a committed file, as lines of text.

    Another version of PyTorch or another CPU may sum in another order; in float64 that moves a
    value by far less than float32 can show, so at most the last bit may differ. Gradients that are
    zero but for rounding (the key part of c_attn.bias) need the absolute term.
    """
    with safe_open(path, "pt") as f:
        stored = {n: f.get_tensor(n) for n in f.keys()}
    if stored.keys() != tensors.keys():
        return [f"{path.name}: other tensors: {sorted(stored.keys() ^ tensors.keys())}"]
    return [
        f"{path.name}: {n} differs by up to {(stored[n].double() - t.double()).abs().max():.1e}"
        for n, t in tensors.items()
        if stored[n].dtype != t.dtype
        or not torch.allclose(stored[n].double(), t.double(), rtol=2e-7, atol=1e-12)
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    args = parser.parse_args()
    weights = {n: initial(n, s) for n, s in shapes(LAYERS_MAX, tied=False).items()}
    files = {"gpt2_tiny_weights": (weights, about(None))}
    for case in CASES:
        files[f"gpt2_tiny_{case.name}"] = (run(case, weights), about(case))
    wrong = []
    for name, (tensors, metadata) in files.items():
        path = HERE / f"{name}.safetensors"
        if args.check:
            wrong += differences(path, tensors)
        else:
            save_file(tensors, path, metadata=metadata)
            print(f"{path.name}: {len(tensors)} tensors, {path.stat().st_size} bytes")
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
