# SPDX-License-Identifier: Apache-2.0
"""JAX: fa2_cpu.jax.dot_product_attention inside a jitted training step, against jax.nn's."""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import fa2_cpu.jax  # noqa: E402

HEADS, DIM, VOCAB, LENGTH = 4, 32, 32, 24


def parameters(key):
    shapes = {"tokens": (VOCAB, DIM), "positions": (LENGTH, DIM), "qkv": (DIM, 3 * DIM), "head": (DIM, VOCAB)}
    keys = jax.random.split(key, len(shapes))
    return {name: 0.3 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items())}


def loss_of(attention, p, ids):
    """Cross entropy of naming the first token at every position."""
    x = p["tokens"][ids] + p["positions"]
    q, k, v = jnp.split((x @ p["qkv"]).reshape(*ids.shape, 3 * HEADS, DIM // HEADS), 3, axis=2)
    logits = attention(q, k, v, is_causal=True).reshape(*ids.shape, DIM) @ p["head"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, :1, None], -1).mean()


def train(attention, steps: int) -> list[float]:
    step = jax.jit(jax.value_and_grad(lambda p, ids: loss_of(attention, p, ids)))
    p = parameters(jax.random.key(0))
    losses = []
    for i in range(steps):
        ids = jax.random.randint(jax.random.key(i), (16, LENGTH), 0, VOCAB)
        loss, grads = step(p, ids)
        p = jax.tree.map(lambda x, g: x - 0.5 * g, p, grads)
        losses.append(float(loss))
    return losses


def main(steps: int) -> None:
    xla = train(jax.nn.dot_product_attention, steps)
    ours = train(fa2_cpu.jax.dot_product_attention, steps)
    print(f"loss after {steps} steps: jax.nn {xla[-1]:.4f}, fa2 {ours[-1]:.4f}")
    assert all(abs(a - b) < 1e-3 for a, b in zip(xla, ours)) and ours[-1] < ours[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    main(parser.parse_args().steps)
