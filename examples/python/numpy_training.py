# SPDX-License-Identifier: Apache-2.0
"""NumPy alone: one attention layer learns to look at the first token, by hand-written steps.

Shows fa2_cpu.attention_forward and attention_backward, cross_entropy, embedding_backward, and a check of the gradients
against the float64 oracle.
"""

import argparse

import numpy as np

import fa2_cpu as fa2


def main(steps: int) -> None:
    rng = np.random.default_rng(0)
    vocab, dim, heads, length, batch = 32, 32, 4, 24, 16
    embedding = rng.standard_normal((vocab, dim)).astype(np.float32) * 0.5
    weights = {n: (rng.standard_normal((dim, dim)) / np.sqrt(dim)).astype(np.float32) for n in ("q", "k", "v")}
    head = np.zeros((dim, vocab), np.float32)
    position = rng.standard_normal((length, dim)).astype(np.float32)
    parameters = {"embedding": embedding, "head": head, "position": position, **weights}
    momentum = {n: np.zeros_like(x) for n, x in parameters.items()}
    squares = {n: np.zeros_like(x) for n, x in parameters.items()}

    def split(x):
        return x.reshape(batch, length, heads, dim // heads)

    first = last = None
    for step in range(1, steps + 1):
        ids = rng.integers(0, vocab, (batch, length))
        targets = np.repeat(ids[:, :1], length, 1)
        x = embedding[ids] + position
        q, k, v = (split(x @ weights[n]) for n in "qkv")
        options = dict(layout="bshd", causal="top_left")
        out, lse = fa2.attention_forward(q, k, v, **options)
        hidden = out.reshape(batch, length, dim)
        loss, dlogits = fa2.cross_entropy(hidden @ head, targets)

        dhidden = dlogits @ head.T
        attention = fa2.attention_backward(split(dhidden), q, k, v, out, lse, **options)
        grads = {"head": hidden.reshape(-1, dim).T @ dlogits.reshape(-1, vocab)}
        dx = np.zeros_like(x)
        for name, grad in zip("qkv", attention):
            grad = grad.reshape(batch * length, dim)
            grads[name] = x.reshape(-1, dim).T @ grad
            dx += (grad @ weights[name].T).reshape(x.shape)
        grads["embedding"] = fa2.embedding_backward(dx, ids, vocab)
        grads["position"] = dx.sum(0)
        if step == 1:
            expected = fa2.reference.attention_backward(split(dhidden), q, k, v, out, lse, **options)
            for name, got, right in zip(("dq", "dk", "dv"), attention, expected):
                error = np.linalg.norm(got - right) / max(np.linalg.norm(right), 1e-30)
                print(f"{name}: relative error against the float64 oracle {error:.1e}")
                assert error < 3e-6
        for name, parameter in parameters.items():  # Adam
            momentum[name] += 0.1 * (grads[name] - momentum[name])
            squares[name] += 0.01 * (grads[name] ** 2 - squares[name])
            scale = np.sqrt(squares[name] / (1 - 0.99**step)) + 1e-8
            parameter -= 0.01 * momentum[name] / (1 - 0.9**step) / scale
        first = float(loss) if first is None else first
        last = float(loss)
        if step % 20 == 0:
            print(f"step {step}: loss {last:.3f}")
    assert last < 0.7 * first, (first, last)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
