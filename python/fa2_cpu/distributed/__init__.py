# SPDX-License-Identifier: Apache-2.0
"""Attention of sequences that are spread over processes (context parallelism), through torch.distributed.

    import torch.distributed as dist
    import fa2_cpu.distributed as fd

    dist.init_process_group("gloo")                                     # torchrun starts a process for each rank
    q, k, v = fd.shard((q, k, v), dim=2)                                # or: data that is in parts already
    out, lse = fd.attention(q, k, v, causal="top_left")                 # out of this rank's queries
    with fd.context_parallel():                                         # an unchanged model
        loss = model(**fd.shard(batch)).loss

Works with any engine of torch.distributed that sends CPU tensors: gloo, MPI. See docs/distributed.md.
"""

from fa2_cpu.distributed._attention import attention
from fa2_cpu.distributed._context import context_parallel
from fa2_cpu.distributed._parts import shard, unshard

__all__ = ["attention", "context_parallel", "shard", "unshard"]


def _register_dtensor() -> None:
    import importlib.util

    if importlib.util.find_spec("torch.distributed.tensor") is not None:
        from fa2_cpu.distributed import _dtensor

        _dtensor.register()


_register_dtensor()
