# SPDX-License-Identifier: Apache-2.0
"""What the usual mistakes of an attention backward look like, measured against the float64 oracle.

A small backward in NumPy stands for the kernel that is being ported: grouped heads, causal from the bottom right, more keys
than queries, P and dS rounded to bf16 as GPU kernels do. Each mistake is put in by itself, and the relative L2 errors of
dQ, dK and dV are printed: which of them are wrong, and by how much, tells mistakes apart.
"""

import numpy as np

import fa2_cpu as fa2

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, DIM = 1, 4, 2, 192, 256, 64
TILE = 64
BF16_BOUND = 2.5e-3  # P and dS rounded to bf16

# name: which of dQ, dK, dV it spoils
MISTAKES = {
    "none": "",
    "dS not multiplied by scale": "qk",
    "delta left out: dS = P dP": "qk",
    "delta from rows of dO alone, not dO out": "qk",
    "lse taken for one in base 2": "qkv",
    "causal from the top left": "qkv",
    "diagonal hidden too": "qkv",
    "last tile of keys skipped": "qkv",
    "last tile of queries skipped in dK, dV": "kv",
    "last tile's dQ overwrites instead of adding": "q",
    "dK, dV of one query head, not the group's sum": "kv",
    "dV from dP instead of P": "v",
    "dK from Q rows one off": "k",
    "sums over keys in bf16, 16 keys at a time": "q",
}


def round_bf16(x):
    """To bf16, ties to even, as float64."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(np.float64)


def backward(mistake, dout, q, k, v, out, lse):
    """dQ, dK, dV of [heads, rows, dim] arrays, head by head."""
    scale = 1 / np.sqrt(DIM)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    query, key = np.arange(QUERIES)[:, None], np.arange(KEYS)[None, :]
    offset = 0 if mistake == "causal from the top left" else KEYS - QUERIES
    visible = key <= query + offset - (mistake == "diagonal hidden too")
    if mistake == "last tile of keys skipped":
        visible = visible & (key < KEYS - TILE)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        exponent = q[head] @ k[group].T * scale
        if mistake == "lse taken for one in base 2":
            p = np.exp(exponent - lse[head][:, None] * np.log(2)) * visible
        else:
            p = np.exp(exponent - lse[head][:, None]) * visible
        dp = dout[head] @ v[group].T
        delta = (dout[head] * out[head]).sum(-1, keepdims=True)
        if mistake.startswith("delta left out"):
            delta = 0
        elif mistake.startswith("delta from rows"):
            delta = dout[head].sum(-1, keepdims=True)
        ds = round_bf16(p * (dp - delta))
        p = round_bf16(p)
        factor = 1 if mistake.startswith("dS not multiplied") else scale

        step = 16 if mistake.startswith("sums over keys") else TILE
        tiles = [ds[:, i : i + step] @ k[group][i : i + step] * factor for i in range(0, KEYS, step)]
        if mistake.startswith("last tile's dQ"):
            dq[head] = tiles[-1]
        elif mistake.startswith("sums over keys"):
            for tile in tiles:
                dq[head] = round_bf16(dq[head] + tile)
        else:
            dq[head] = sum(tiles)

        rows = slice(0, QUERIES - TILE if mistake.startswith("last tile of queries") else QUERIES)
        right = np.roll(q[head], 1, axis=0) if mistake.startswith("dK from Q") else q[head]
        weights = dp * visible if mistake.startswith("dV from dP") else p
        if mistake.startswith("dK, dV of one"):
            dk[group], dv[group] = 0, 0
        dk[group] += ds[rows].T @ right[rows] * factor
        dv[group] += weights[rows].T @ dout[head][rows]
    return dq, dk, dv


def main() -> None:
    rng = np.random.default_rng(0)

    def draw(heads, rows):
        return round_bf16(rng.standard_normal((BATCH, heads, rows, DIM)))

    q, k, v = draw(HEADS, QUERIES), draw(KV_HEADS, KEYS), draw(KV_HEADS, KEYS)
    dout = draw(HEADS, QUERIES)
    out, lse = fa2.reference.attention_forward(q, k, v, causal="bottom_right")
    expected = fa2.reference.attention_backward(dout, q, k, v, out, lse, causal="bottom_right")

    print(f"{'relative L2 error of':45}     dQ       dK       dV")
    for mistake, spoils in MISTAKES.items():
        got = backward(mistake, *(np.asarray(x)[0] for x in (dout, q, k, v, out, lse)))
        errors = [
            np.linalg.norm(g - np.asarray(e)[0]) / np.linalg.norm(e)
            for g, e in zip(got, (expected.dq, expected.dk, expected.dv), strict=True)
        ]
        print(f"{mistake:45} " + " ".join(f"{e:8.1e}" for e in errors))
        for name, error in zip("qkv", errors, strict=True):
            assert (error > BF16_BOUND) == (name in spoils), f"{mistake}: d{name.upper()} errs by {error}"


if __name__ == "__main__":
    main()
