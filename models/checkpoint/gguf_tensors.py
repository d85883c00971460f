"""Tensors of a GGUF file under the names of a checkpoint, with the changes of llama.cpp's converter undone.

In addition to changes within a tensor (see `Matrix`) the converter splits some: `attn_k_b` and `attn_v_b` are parts of
DeepSeek's kv_b_proj, `ffn_gate_exps` and `ffn_up_exps` alternating rows of gpt-oss's gate_up_proj, `attn_qkv` and
`attn_gate` rows of Qwen3-Next's in_proj_qkvz, and gate and up those of Granite 4's input_linear. It joins others: old
files of Phi-2 have one tensor `attn_qkv` for three projections, `ffn_gate_up_exps` has the experts' gate and up, and
`altup_proj` has the matrices of all streams.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..families.gguf_families import GgufFamily
from ..families.state_layers import DeltaNet
from .gguf_matrix import Matrix

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ..config import DecoderConfig
    from ..layers.weights import Weight
    from .weight_files import StoredTensor

_NUMBERED = re.compile(r"(?<=\.experts|jections)\.(\d+)(?=\.)")
"""Number of an expert, or of a stream's matrix (Gemma 3n)."""
_PROJECTION = re.compile(r"\.attn_([qkv])\.")
_HALF = re.compile(r"(?<=\.experts\.)(gate|up)(?=_proj\.)")
_SHARED_GATE = "ffn_gate_inp_shexp"
_CORRECTION, _CONVOLUTIONS = "exp_probs_b", (".shortconv.conv.weight", ".ssm_conv1d.weight")
_VECTORS = (".ssm_a", ".ssm_d", ".ssm_norm.weight")
"""Endings of tensors that are vectors in a checkpoint, and have more sizes in a file."""


class GgufTensors:
    """Tensors of a file, which are found by their names in a checkpoint."""

    def __init__(
        self, path: Path, tensors: Mapping[str, Any], family: GgufFamily, config: DecoderConfig, names: Any
    ) -> None:
        """`names` is the package's map of names."""
        self._tensors = {
            name: Matrix(path, tensor, tuple(int(size) for size in reversed(tensor.shape)))
            for name, tensor in tensors.items()
        }
        self._family = family
        self._config = config
        self._names = names
        self._unused = set(self._tensors)

    def rest(self) -> dict[str, StoredTensor]:
        """Tensors that were not asked for, by their names in the file."""
        return {name: _stored(self._whole(name)) for name in self._tensors if name in self._unused}

    def find(self, name: str) -> StoredTensor | None:
        """The tensor that a checkpoint calls `name`; None: the file has none."""
        number, whole_name = _NUMBERED.search(name), _NUMBERED.sub("", name)
        stored = self._name_in_file(whole_name)
        if stored in self._tensors:
            whole = self._whole(stored)
            return _stored(whole if number is None else whole.of_part(int(number[1])))
        if number is not None and ".gate_up_proj." in name:
            halves = [self.find(name.replace("gate_up_proj", half)) for half in ("gate_proj", "up_proj")]
            return _joined(halves, lambda gate, up: (gate[0] + up[0], *gate[1:]), _alternating)
        if name.endswith(".kv_b_proj.weight"):
            halves = [self._part(stored.replace("kv_b", half)) for half in ("k_b", "v_b")]
            return _joined(halves, lambda keys, values: (keys[0] * (keys[2] + values[1]), keys[1]), _heads)
        if name.endswith(".in_proj_qkvz.weight"):
            halves = [self._part(stored.replace("ssm_in", half)) for half in ("attn_qkv", "attn_gate")]
            return _stacked(halves, _by_key_head(self._config))
        if name.endswith(".shared_mlp.input_linear.weight"):
            down = self._name_in_file(name.replace("input", "output"))
            return _stacked([self._part(down.replace("_down", half)) for half in ("_gate", "_up")])
        if number is not None and (half := _HALF.search(whole_name)) is not None:
            return self._half(self._name_in_file(_HALF.sub("gate_up", whole_name)), int(number[1]), half[1])
        return self._of_merged(stored)

    def _name_in_file(self, name: str) -> str:
        """Name in the file; that of a tensor without a suffix gets one."""
        for pattern, replacement in self._family.renames:
            name = re.sub(pattern, replacement, name)
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        found = name if name.startswith("blk.") else str(self._names.get_name(name, (".weight", ".bias")))
        candidates = f"{found}.weight", found, found.replace("_shexp", "")  # Granite 4 has one MLP
        return next((candidate for candidate in candidates if candidate in self._tensors), found)

    def _half(self, stored: str, expert: int, half: str) -> StoredTensor | None:
        """Gate or up of an expert, if a file has both in one tensor."""
        import numpy as np

        if stored not in self._tensors:
            return None
        whole = self._whole(stored).of_part(expert)
        size = whole.stored[0] // 2
        return _stored(whole._replace(rows=np.arange(size) + (size if half == "up" else 0)))

    def _part(self, stored: str) -> StoredTensor | None:
        return _stored(self._whole(stored)) if stored in self._tensors else None

    def _of_merged(self, stored: str) -> StoredTensor | None:
        """A projection of queries, keys or values, if the file has one tensor for the three."""
        import numpy as np

        found = _PROJECTION.search(stored)
        merged = _PROJECTION.sub(".attn_qkv.", stored)
        if found is None or merged not in self._tensors:
            return None
        config = self._config
        ends = np.cumsum([0, config.num_heads, config.num_kv_heads, config.num_kv_heads]) * config.head_dim
        whole, index = self._whole(merged), "qkv".index(found[1])
        if whole.stored[0] != ends[-1]:
            return _stored(whole)  # the error has both shapes
        return _stored(whole._replace(rows=np.arange(ends[index], ends[index + 1])))

    def _whole(self, stored: str) -> Matrix:
        """All of a tensor, as the checkpoint has it."""
        import numpy as np

        self._unused.discard(stored)
        found, config = self._tensors[stored], self._config
        shape = found.stored
        if len(shape) == 1 and (_SHARED_GATE in stored or (_CORRECTION in stored and _has_row(config))):
            shape = (1, *shape)
        if stored.endswith(_CONVOLUTIONS) and len(shape) == 2:
            shape = (shape[0], 1, shape[1])
        if stored.endswith(_VECTORS):
            shape = (math.prod(shape),)
        rotated = {".attn_q.": config.num_heads, ".attn_k.": config.num_kv_heads}
        heads = next((number for part, number in rotated.items() if part in stored), 0)
        rows = None
        if self._family.neighbours_rotated and heads and found.tensor.n_elements:  # else a shape may say anything
            rows = np.arange(shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        block = config.block
        if block is not None and block.by_head and ".attn_qkv." in stored:
            rows = _rows_by_head(config, shape[0])
        columns = None
        if self._family.tiled and isinstance(config.states, DeltaNet):
            if stored.endswith(".ssm_out.weight"):
                columns = _of_tiled(config.states, stored, shape[1])
            else:
                rows = _of_tiled(config.states, stored, shape[0])
        # The converter adds what the model would add to its norms.
        is_offset = stored.endswith("norm.weight") and not stored.endswith(".ssm_norm.weight")
        return found._replace(
            stored=shape,
            rows=rows,
            columns=columns,
            offset=config.norm_offset if is_offset else 0.0,
            negated_exp=stored.endswith(".ssm_a"),
            transposed=block is not None and block.transposed and len(shape) == 2 and stored.startswith("blk."),
        )


def _has_row(config: DecoderConfig) -> bool:
    """True if the bias of the experts' choice is [1, E]."""
    return config.experts is not None and config.experts.traits.correction_row


def _rows_by_head(config: DecoderConfig, size: int) -> np.ndarray | None:
    """Order of rows that the file has as all queries, all keys and all values, and the checkpoint by KV head."""
    import numpy as np

    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    if size != (heads + 2 * kv_heads) * dim:
        return None  # the error has both shapes
    rows = np.arange(size).reshape(-1, dim)
    parts = [part.reshape(kv_heads, -1, dim) for part in np.split(rows, [heads, heads + kv_heads])]
    return np.concatenate(parts, 1).reshape(-1)


def _of_tiled(states: DeltaNet, stored: str, size: int) -> np.ndarray | None:
    """Order of `size` rows, or columns, of which the file has all first value heads of the key heads, then all second
    ones, and so on; None: they are no value heads."""
    import numpy as np

    heads = np.arange(states.value_heads).reshape(-1, states.key_heads).T.reshape(-1)
    values = (heads[:, None] * states.value_dim + np.arange(states.value_dim)).reshape(-1)
    keys = np.arange(2 * states.key_heads * states.key_dim)
    orders = {
        (".attn_qkv.weight", ".ssm_conv1d.weight"): np.concatenate((keys, len(keys) + values)),
        (".attn_gate.weight", ".ssm_out.weight"): values,
        (".ssm_alpha.weight", ".ssm_beta.weight", ".ssm_a", ".ssm_dt.bias"): heads,
    }
    found = next((order for endings, order in orders.items() if stored.endswith(endings)), None)
    return found if found is not None and len(found) == size else None  # else the error has both shapes


def _by_key_head(config: DecoderConfig) -> np.ndarray:
    """Order of rows that the file has as all queries, keys, values and gates, and the checkpoint by key head."""
    import numpy as np

    states = config.states
    assert isinstance(states, DeltaNet), "the layer is a delta net"
    sizes = [states.key_heads * states.key_dim] * 2 + [states.value_heads * states.value_dim] * 2
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes[:-1]))
    return np.concatenate([part.reshape(states.key_heads, -1) for part in parts], 1).reshape(-1)


def _stored(matrix: Matrix) -> StoredTensor:
    from .weight_files import StoredTensor

    return StoredTensor(matrix.shape, matrix.read)


def _joined(
    parts: list[StoredTensor | None],
    shape: Callable[[tuple[int, ...], tuple[int, ...]], tuple[int, ...]],
    join: Callable[[Tensor, Tensor], Tensor],
) -> StoredTensor | None:
    """Tensor of two parts, dequantised; `shape` maps their shapes to the whole's."""
    from .weight_files import StoredTensor

    first, second = parts
    if first is None or second is None:
        return None
    return StoredTensor(shape(first.shape, second.shape), lambda: join(first.dense(), second.dense()))


def _stacked(parts: list[StoredTensor | None], rows: np.ndarray | None = None) -> StoredTensor | None:
    """Rows of all parts, in the order `rows`; packed if the parts have one form."""
    from .weight_files import StoredTensor

    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    size = sum(part.shape[0] for part in found)
    order = rows if rows is not None and len(rows) == size else None  # else the error has both shapes

    def read() -> Weight:
        import torch

        from ...kernels.quantized_linear import QuantizedWeight

        weights = [part.read() for part in found]
        packed = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
        index = None if order is None else torch.from_numpy(order)
        if len(packed) == len(found) and all(weight.has_form_of(packed[0]) for weight in packed):
            merged = QuantizedWeight.cat(packed)
            return merged if index is None else merged.take(index)
        dense = torch.cat([w if isinstance(w, torch.Tensor) else w.dequantized() for w in weights])
        return dense if index is None else dense[index]

    return StoredTensor((size, *found[0].shape[1:]), read)


def _alternating(gate: Tensor, up: Tensor) -> Tensor:
    """Rows [2I, ...] of gate and up in turn."""
    import torch

    return torch.stack((gate, up), 1).flatten(0, 1)


def _heads(keys: Tensor, values: Tensor) -> Tensor:
    """Weight [H · (N + V), L] from keys [H, L, N] and values [H, V, L]."""
    import torch

    return torch.cat((keys.mT, values), 1).flatten(0, 1)
