# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own functions, which stay themselves while replace_flex_attention() is in place."""

import torch.nn.attention.flex_attention as pytorch

from fa2_cpu.torch._flex._code import copy_of

flex_attention = copy_of(pytorch.flex_attention)
create_block_mask = copy_of(pytorch.create_block_mask)
