"""What TRL's AsyncGRPO takes for granted of a machine with GPUs, for one without: import it before TRL.

TRL itself is not changed. It asks

- whether vLLM is installed beside it, whose sockets and NCCL it uses to send whole models. An adapter is sent as files,
  and vLLM's package is of no use then: an empty one is enough;
- torch for the name of the GPU, for a figure of utilisation that it leaves out if it does not know the name;
- for attention by a kernel from the hub, under a name in transformers' registry, in which `attend` takes its place.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from transformers import AttentionInterface

TREE_ATTENTION = "tree_fa3"
"""TRL's name of its attention."""
_OF_VLLM = {
    "vllm": (),
    "vllm.utils": (),
    "vllm.utils.network_utils": ("get_ip", "get_open_port"),
    "vllm.distributed": (),
    "vllm.distributed.weight_transfer": (),
    "vllm.distributed.weight_transfer.nccl_common": ("trainer_init",),
    "vllm.distributed.weight_transfer.packed_tensor": ("packed_nccl_broadcast_producer",),
}
"""Modules of vLLM that TRL imports, and the names that it takes from each. It calls none when it sends an adapter."""


def _unavailable(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("whole models are sent over NCCL, which needs GPUs and vLLM")


def _stand_in_for_vllm() -> None:
    for name, functions in _OF_VLLM.items():
        module = sys.modules[name] = ModuleType(name)
        spec = ModuleSpec(name, None, is_package=True)
        vars(module).update(dict.fromkeys(functions, _unavailable), __spec__=spec, __path__=[], __version__="0.31.0")


if importlib.util.find_spec("vllm") is None:
    _stand_in_for_vllm()
torch.cuda.get_device_name = lambda device=None: "CPU"


def tree_mask(queries: torch.Tensor, keys: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Mask [N, N] of a row of N tokens, a tree of segments: true if the first token may attend to the second.

    queries [S + 1]: boundaries of the S segments in the row; keys [S + 1]: those of their paths in `indices`, the
    positions on the way from the root to the end of each segment. Ancestors stand before their descendants.
    """
    segments = torch.arange(len(queries) - 1)
    on_path = torch.zeros(len(segments), int(queries[-1]), dtype=torch.bool)
    on_path[segments.repeat_interleave(keys.diff()), indices] = True
    return on_path[segments.repeat_interleave(queries.diff())].tril_()


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attention of one packed row: query [1, heads, N, size] to [1, N, heads, size]."""
    mask = tree_mask(kwargs["tree_cu_seqlens_q"], kwargs["tree_cu_seqlens_k"], kwargs["tree_kv_index"])
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=kwargs.get("scaling"), enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Take the place of TRL's attention, which a trainer registers when it is made: call it afterwards."""
    AttentionInterface.register(TREE_ATTENTION, attend)
