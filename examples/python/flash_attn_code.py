# SPDX-License-Identifier: Apache-2.0
"""Code written for flash-attn runs on a CPU unchanged, after one line.

Below the line is what a GPU training script holds: packed qkv, padding removed, causal attention with
ALiBi, its gradient. The padded and the packed way must agree.
"""

import argparse

import fa2_cpu.flash_attn

fa2_cpu.flash_attn.install_as_flash_attn()

import torch  # noqa: E402
from flash_attn import flash_attn_qkvpacked_func, flash_attn_varlen_qkvpacked_func  # noqa: E402
from flash_attn.bert_padding import pad_input, unpad_input  # noqa: E402


def main(length: int) -> None:
    torch.manual_seed(0)
    lengths = [length, length // 2, length // 3]
    heads, head_dim = 4, 32
    qkv = torch.randn(len(lengths), length, 3, heads, head_dim, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.arange(length)[None] < torch.tensor(lengths)[:, None]
    slopes = 2.0 ** -torch.arange(1.0, heads + 1)

    packed, indices, cu_seqlens, longest, _ = unpad_input(qkv, mask)
    out = flash_attn_varlen_qkvpacked_func(packed, cu_seqlens, longest, causal=True, alibi_slopes=slopes)
    out = pad_input(out, indices, len(lengths), length)
    out.float().square().sum().backward()
    packed_grad, qkv.grad = qkv.grad, None

    # Causal rows of a sequence never see the padding behind it.
    padded = flash_attn_qkvpacked_func(qkv, causal=True, alibi_slopes=slopes) * mask[..., None, None]
    padded.float().square().sum().backward()
    error = (out - padded).float().norm() / padded.float().norm()
    grad_error = (packed_grad - qkv.grad).float().norm() / qkv.grad.float().norm()
    print(f"{sum(lengths)} tokens of {mask.numel()}: packed against padded, out {error:.1e}, gradient {grad_error:.1e}")
    assert error < 1e-2 and grad_error < 1e-2


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=96)
    main(parser.parse_args().length)
