# SPDX-License-Identifier: Apache-2.0
"""Patterns of block-sparse attention, each trained on for a step and compared with a dense mask.

Packed documents, a sliding window with sink tokens, a tree of drafted tokens, blocks that each query block and kv head
selects for itself, and keys in pages of a cache.
"""

import argparse
from typing import Optional

import torch
from torch.nn.attention.flex_attention import BlockMask, and_masks, or_masks

import fa2_cpu
from fa2_cpu.torch import create_block_mask, flex_attention


# Documents, one after another in a row of tokens: a token sees its own document, up to itself.
def packed_documents(documents: torch.Tensor) -> BlockMask:
    """documents: int [N], the same number for the tokens of a document."""
    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def same(b, h, q_idx, kv_idx):
        return documents[q_idx] == documents[kv_idx]

    n = len(documents)
    return create_block_mask(and_masks(causal, same), None, None, n, n)


# The same from the documents' lengths, with no function evaluated at all: lists and bits by arithmetic.
def documents_of_lengths(cu_seqlens: torch.Tensor, block: int = 128) -> fa2_cpu.BlockMask:
    """cu_seqlens: int [documents + 1], where each document begins, and the number of tokens."""
    n = int(cu_seqlens[-1])
    begins = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())  # token i sees begins[i] to i
    rows = torch.arange(-(-n // block))
    first, last = rows * block, ((rows + 1) * block).clamp(max=n) - 1  # tokens of a row of blocks
    columns = rows
    listed = (columns >= begins[first, None] // block) & (columns <= rows[:, None])
    full = (columns * block >= begins[last, None]) & (columns < rows[:, None])
    partial = listed & ~full

    row, column = partial.nonzero(as_tuple=True)
    within = torch.arange(block)
    q, k = row[:, None, None] * block + within[:, None], column[:, None, None] * block + within
    seen = (k <= q) & (k >= begins[q.clamp(max=n - 1)])
    powers = 2 ** torch.arange(8, dtype=torch.uint8)
    bits = (seen.unflatten(2, (-1, 8)) * powers).sum(-1, dtype=torch.uint8).flatten(1)

    def lists(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sum(-1, dtype=torch.int32)[None, None], (~x).int().argsort(dim=-1, stable=True).int()[None, None]

    return fa2_cpu.BlockMask(*lists(partial), *lists(full), block_size=block, bits=bits)


# A window of the last tokens, and the first ones, which attention falls back on (StreamingLLM's sinks).
def window_and_sinks(n: int, window: int, sinks: int) -> BlockMask:
    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def near(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < window

    def first(b, h, q_idx, kv_idx):
        return kv_idx < sinks

    return create_block_mask(and_masks(causal, or_masks(near, first)), None, None, n, n)


# Drafts of the next tokens as a tree (Medusa, SpecInfer): a node sees the text before and its own ancestors.
def tree(parents: torch.Tensor, before: int) -> BlockMask:
    """parents: int [T], the parent of each node of the tree, -1 for a root; parents come first."""
    nodes = len(parents)
    ancestors = torch.eye(nodes, dtype=torch.bool)
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            ancestors[node] |= ancestors[parent]

    def mask_mod(b, h, q_idx, kv_idx):
        return (kv_idx < before) | ancestors[q_idx, (kv_idx - before).clamp(min=0)]

    return create_block_mask(mask_mod, None, None, nodes, before + nodes, BLOCK_SIZE=(16, 128))


# Blocks of keys that each block of queries selects (the selected branch of DeepSeek's Native Sparse Attention): of what
# lies before, those with the greatest mean scores, a list of its own for each kv head; and its own block, causally.
def selected_blocks(q: torch.Tensor, k: torch.Tensor, count: int, block: int = 64) -> BlockMask:
    """q: [B, Hq, N, D], k: [B, Hkv, N, D], N a multiple of block."""
    with torch.no_grad():
        (batch, heads, n, _), kv_heads = q.shape, k.shape[1]
        rows, group = n // block, heads // kv_heads
        means = [x.unflatten(2, (rows, block)).mean(3) for x in (q.unflatten(1, (kv_heads, group)).mean(2), k)]
        past = torch.ones(rows, rows, dtype=torch.bool).tril(-1)
        best = (means[0] @ means[1].mT).masked_fill(~past, -torch.inf).topk(min(count, rows)).indices
        found = past.sum(-1).clamp(max=count)  # the first blocks have fewer before them

    def of_heads(x: torch.Tensor) -> torch.Tensor:
        return x.int().repeat_interleave(group, 1)

    own = torch.arange(rows).expand(batch, kv_heads, rows)
    return BlockMask.from_kv_blocks(
        of_heads(torch.ones_like(own)), of_heads(own[..., None]),
        of_heads(found.expand_as(own)), of_heads(best),
        BLOCK_SIZE=block, mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, seq_lengths=(n, n), compute_q_blocks=False,
    )  # fmt: skip


# Keys and values in pages of one cache that all sequences share (as vLLM keeps them): the columns of a mask become pages.
def paged(mask: BlockMask, pages: torch.Tensor, count: int) -> BlockMask:
    """mask: for a sequence's own keys, in blocks of a page; pages: int [B, keys / page], where in a cache of `count` pages
    each page of a sequence lies."""
    batch, page = len(pages), mask.BLOCK_SIZE[1]
    owned = torch.full((batch, count), -1).scatter(1, pages, torch.arange(pages.shape[1]).expand_as(pages))

    def placed(number: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = index.expand(batch, -1, -1, -1).long()
        index = pages[:, None, None].expand(-1, *index.shape[1:3], -1).gather(-1, index)
        return number.expand(batch, -1, -1), torch.nn.functional.pad(index, (0, count - index.shape[-1])).int()

    def mask_mod(b, h, q_idx, kv_idx):
        own = owned[b, kv_idx // page]
        return (own >= 0) & mask.mask_mod(b, h, q_idx, own.clamp(min=0) * page + kv_idx % page)

    return BlockMask.from_kv_blocks(
        *placed(mask.kv_num_blocks, mask.kv_indices), *placed(mask.full_kv_num_blocks, mask.full_kv_indices),
        BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask_mod, seq_lengths=(mask.seq_lengths[0], count * page),
    )  # fmt: skip


def dense(mask: BlockMask, shape: tuple[int, ...]) -> torch.Tensor:
    """The same as bool [B, H, Nq, Nk], for comparison alone."""
    q, k = torch.arange(shape[2])[:, None], torch.arange(shape[3])
    b, h = (torch.arange(x)[(slice(None), *[None] * dims)] for x, dims in ((shape[0], 3), (shape[1], 2)))
    visible = torch.zeros(shape, dtype=torch.bool)
    for count, index, whole in (
        (mask.kv_num_blocks, mask.kv_indices, False), (mask.full_kv_num_blocks, mask.full_kv_indices, True),
    ):  # fmt: skip
        listed = torch.arange(index.shape[-1]) < count[..., None]
        columns = -(-shape[3] // mask.BLOCK_SIZE[1])
        table = torch.zeros(*index.shape[:-1], columns + 1, dtype=torch.bool)
        table.scatter_(-1, torch.where(listed, index, columns).long(), True)
        pairs = table[:, :, q // mask.BLOCK_SIZE[0], k // mask.BLOCK_SIZE[1]]
        visible |= pairs if whole else pairs & mask.mask_mod(b, h, q, k)
    return visible


def check(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask, like: Optional[BlockMask] = None) -> None:
    """A step of training with a mask against the same with a dense one, that of `like`, or of mask itself."""
    visible = dense(like or mask, (*q.shape[:3], k.shape[2]))
    results = []
    for sparse in (True, False):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        if sparse:
            out = flex_attention(*leaves, block_mask=mask, enable_gqa=True)
        else:
            each = [x.expand(len(q), -1, -1, -1) for x in leaves]
            out = torch.nn.functional.scaled_dot_product_attention(*each, attn_mask=visible, enable_gqa=True)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    errors = [float((x - y).norm() / y.norm()) for x, y in zip(*results)]
    print(f"{name}: {visible.float().mean():.1%} visible, out, dq, dk, dv off by {', '.join(f'{x:.0e}' for x in errors)}")
    assert max(errors) < 1e-5


def main(n: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, n, 32) for heads in (4, 2, 2))
    documents = torch.sort(torch.randint(5, (n,))).values
    packed = packed_documents(documents)
    check("packed documents", q, k, v, packed)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), documents.bincount().cumsum(0)])
    check("documents of lengths", q, k, v, documents_of_lengths(cu_seqlens), like=packed)
    check("window and sinks", q, k, v, window_and_sinks(n, n // 8, 4))
    parents = torch.tensor([-1, 0, 0, 1, 1, 2, 3, -1, 7])
    before = n - len(parents)
    check("tree", q[:, :, : len(parents)], k, v, tree(parents, before))
    check("selected blocks", q, k, v, selected_blocks(q, k, count=3))
    causal = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, n, n, BLOCK_SIZE=64)
    pages = torch.randperm(2 * (n // 64) + 3)[: 2 * (n // 64)].view(2, -1)  # of two sequences, and three that are free
    count = pages.numel() + 3
    cache = [torch.randn(1, 2, count * 64, 32) for _ in range(2)]
    check("paged", torch.cat((q, -q)), *cache, paged(causal, pages, count))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=768, help="tokens, a multiple of 64 (default %(default)s)")
    main(parser.parse_args().length)
