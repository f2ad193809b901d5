# SPDX-License-Identifier: Apache-2.0
"""context_parallel: the attention of an unchanged model over the parts of its sequence that ranks hold."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Callable, NoReturn, Optional

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fa2_cpu.distributed import _agree, _checkpoints
from fa2_cpu.distributed._attention import run
from fa2_cpu.distributed._options import METHODS, Call
from fa2_cpu.distributed._parts import _check_shards
from fa2_cpu.distributed._team import Team, team_of
from fa2_cpu.torch._sdpa import autocast, refusal


class Settings:
    """What every attention inside the block shares."""

    def __init__(self, team: Team, method: str, shards: str) -> None:
        self.team, self.method, self.shards = team, method, shards

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """out of fa2_cpu.distributed.attention."""
        defaults = dict(
            bias=None, alibi_slopes=None, sinks=None, cu_seqlens_q=None, cu_seqlens_k=None, philox=None, layout="bhsd",
            scale=None, causal=None, window=(-1, -1), softcap=0.0, dropout_p=0.0, max_seqlen_q=0, max_seqlen_k=0,
            precision="torch", method=self.method, shards=self.shards,
        )  # fmt: skip
        return run(Call(q=q, k=k, v=v, **{**defaults, **options}), self.team)[0]

    def refuse(self, problem: Exception) -> NoReturn:
        """Raises problem here, and its sentence on the ranks that come to their attention."""

        def prepare() -> NoReturn:
            raise problem

        _agree.exchange(self.team, "attention", prepare)
        raise problem


class _Mode(TorchFunctionMode):
    """Sees every call of F.scaled_dot_product_attention, however it was imported."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        # How many functions run under it now, in which it sees nothing: Tensor.backward, and what a checkpoint computes there.
        self.blind = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            return _sdpa(self._settings, *args, **(kwargs or {}))
        self.blind += 1
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.blind -= 1


def _sdpa(
    settings: Settings, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> Tensor:
    problem = refusal(query, key, value, attn_mask, is_causal)
    if problem is None and {query.dim(), key.dim(), value.dim()} != {4}:
        problem = ValueError(
            f"query, key and value have {query.dim()}, {key.dim()} and {value.dim()} dimensions; under "
            "context_parallel they must be [B, H, N, D]"
        )
    if problem is None and query.shape[1] != key.shape[1] and not enable_gqa:
        problem = ValueError(f"query has {query.shape[1]} heads and key {key.shape[1]}; they must agree without enable_gqa")
    if problem is not None:
        settings.refuse(problem)
    query, key, value = (autocast(x) for x in (query, key, value))
    return settings.attention(
        query, key, value, bias=attn_mask, dropout_p=dropout_p, causal="top_left" if is_causal else None, scale=scale
    )


class context_parallel:  # noqa: N801: used as a function is
    """Within the block attention is that of the whole sequence, of which each rank's tensors are a part.

        with fa2_cpu.distributed.context_parallel():
            logits = model(input_ids=fa2_cpu.distributed.shard(input_ids)).logits
            loss = ...                  # of this rank's rows; shard the labels after shifting them
        loss.backward()                 # inside the block or outside

    F.scaled_dot_product_attention, and the attention of transformers models with attn_implementation "sdpa" or "fa2",
    become fa2_cpu.distributed.attention. Gradients are those of the sum of all ranks' losses; parameters that ranks
    share need theirs summed (or averaged, as DistributedDataParallel does).

    transformers models get the position_ids of this rank's rows where none are given. An attention mask that hides
    tokens is refused, as are caches and models whose forward takes no position_ids; cu_seq_lens_q and cu_seq_lens_k
    (of the whole batch) say where packed documents start.

    Args:
      group, method, shards: as for attention.

    Raises:
      ValueError: an unknown method or shards; within the block, what cannot be computed of parts.
      RuntimeError: there is no process group; within the block, as attention.

    Example (a group of one process; torchrun starts one for each rank):
      >>> import torch, torch.distributed as dist, fa2_cpu.distributed as fd
      >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun: "gloo" alone
      >>> q = fd.shard(torch.randn(1, 2, 10, 8), dim=2).requires_grad_()
      >>> with fd.context_parallel():
      ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
      >>> out.sum().backward()
      >>> q.grad.shape
      torch.Size([1, 2, 10, 8])
      >>> dist.destroy_process_group()
    """

    def __init__(self, group: Any = None, *, method: str = "auto", shards: str = "zigzag") -> None:
        if method not in METHODS:
            raise ValueError(f"method is {method!r}; it must be one of {', '.join(map(repr, METHODS))}")
        _check_shards(shards)
        self._prepare(Settings(team_of(group), method, shards))

    def _prepare(self, settings: Settings) -> None:
        self._settings = settings
        self._mode: Optional[_Mode] = None
        self._undo: list[Callable[[], None]] = []

    def _resume(self) -> AbstractContextManager[Any]:
        """The block again where it has ended, or sees nothing; for what a checkpoint computes anew."""
        if self._mode is not None and not self._mode.blind:
            return nullcontext()
        again = context_parallel.__new__(context_parallel)
        again._prepare(self._settings)
        return again

    def __enter__(self) -> context_parallel:
        if self._mode is not None:
            raise RuntimeError("this context_parallel is entered already; make another one")
        if "transformers" in sys.modules:
            from fa2_cpu.distributed import _transformers

            self._undo += _transformers.install(self._settings)
        self._undo += _checkpoints.install(self._resume)
        self._mode = _Mode(self._settings)
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._mode.__exit__(*exception)
        self._mode = None
        while self._undo:
            self._undo.pop()()
