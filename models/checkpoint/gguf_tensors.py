"""Tensors of a GGUF file under the names of a checkpoint, with the changes of llama.cpp's converter undone.

Beside changes within a tensor (see `Matrix`) the converter splits some: `attn_k_b` and `attn_v_b` are parts of
DeepSeek's kv_b_proj, `ffn_gate_exps` and `ffn_up_exps` alternating rows of gpt-oss's gate_up_proj. Old files of Phi-2
have one tensor `attn_qkv` for three projections.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..families.gguf_families import GgufFamily
from .gguf_reader import reading

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ..config import DecoderConfig
    from ..layers.weights import Weight
    from .weight_files import StoredTensor

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_PROJECTION = re.compile(r"\.attn_([qkv])\.")
_SHARED_GATE = "ffn_gate_inp_shexp"
_CORRECTION, _CONVOLUTION = "exp_probs_b", "shortconv.conv"


class Matrix(NamedTuple):
    """Tensor in a GGUF file, and what its converter did to the one in the checkpoint."""

    path: Path
    tensor: Any
    stored: tuple[int, ...]
    """Shape in the file."""
    expert: int | None = None
    """Index of the expert to whom this part of the tensor belongs."""
    rows: np.ndarray | None = None
    """[rows] index in the file of each row; None: they are in their order."""
    offset: float = 0.0
    """Number that the converter added to all elements."""
    transposed: bool = False
    """True: the checkpoint has the transposed matrix."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the checkpoint."""
        shape = self.stored if self.rows is None else (len(self.rows), *self.stored[1:])
        return shape[::-1] if self.transposed else shape

    def of_expert(self, index: int) -> Matrix:
        """Part of an expert."""
        return self._replace(expert=index, stored=self.stored[1:])

    def read(self) -> Weight:
        """The checkpoint's tensor; a matrix of a quantised type stays packed unless the converter changed its
        numbers."""
        import torch

        from ..quantization.gguf_blocks import read_blocks

        with reading(self.path, f"the tensor {self.tensor.name}"):
            import gguf
            import numpy as np

            data = self.tensor.data if self.expert is None else self.tensor.data[self.expert]
            if len(self.stored) == 2 and not self.transposed and not self.offset:
                packed = read_blocks(self.tensor.tensor_type.name, data, self.stored)
                if packed is not None:
                    return packed if self.rows is None else packed.take(torch.from_numpy(self.rows))
            values = gguf.dequantize(data, self.tensor.tensor_type).reshape(self.stored)
            if self.rows is not None:
                values = values[self.rows]
            if self.offset:
                values = values - np.float32(self.offset)
            if self.transposed:
                values = np.ascontiguousarray(values.T)
            return torch.from_numpy(np.require(values, requirements="W"))


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
        expert = _EXPERT.search(name)
        stored = self._name_in_file(_EXPERT.sub(".experts.", name))
        if stored in self._tensors:
            whole = self._whole(stored)
            return _stored(whole if expert is None else whole.of_expert(int(expert[1])))
        if expert is not None and ".gate_up_proj." in name:
            halves = [self.find(name.replace("gate_up_proj", half)) for half in ("gate_proj", "up_proj")]
            return _joined(halves, lambda gate, up: (gate[0] + up[0], *gate[1:]), _alternating)
        if name.endswith(".kv_b_proj.weight"):
            halves = [self._part(stored.replace("kv_b", half)) for half in ("k_b", "v_b")]
            return _joined(halves, lambda keys, values: (keys[0] * (keys[2] + values[1]), keys[1]), _heads)
        return self._of_merged(stored)

    def _name_in_file(self, name: str) -> str:
        """Name in the file; that of a tensor without a suffix gets one."""
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = name.replace(".expert_bias", ".expert_bias.bias")
        if ".feed_forward.experts." in name:  # the converter drops the prefix there
            name = name.removeprefix("model.")
        found = str(self._names.get_name(name, (".weight", ".bias")))
        return f"{found}.weight" if f"{found}.weight" in self._tensors else found

    def _part(self, stored: str) -> StoredTensor | None:
        return _stored(self._whole(stored)) if stored in self._tensors else None

    def _of_merged(self, stored: str) -> StoredTensor | None:
        """A projection of queries, keys or values, where the file has one tensor for the three."""
        import numpy as np

        found = _PROJECTION.search(stored)
        merged = _PROJECTION.sub(".attn_qkv.", stored)
        if found is None or merged not in self._tensors:
            return None
        config = self._config
        ends = np.cumsum([0, config.num_heads, config.num_kv_heads, config.num_kv_heads]) * config.head_dim
        whole, index = self._whole(merged), "qkv".index(found[1])
        if whole.stored[0] != ends[-1]:
            return _stored(whole)  # the error tells the two shapes
        return _stored(whole._replace(rows=np.arange(ends[index], ends[index + 1])))

    def _whole(self, stored: str) -> Matrix:
        """All of a tensor, as the checkpoint has it."""
        import numpy as np

        self._unused.discard(stored)
        found, config = self._tensors[stored], self._config
        shape = found.stored
        if len(shape) == 1 and (_SHARED_GATE in stored or (_CORRECTION in stored and _has_row(config))):
            shape = (1, *shape)
        if _CONVOLUTION in stored and len(shape) == 2:
            shape = (shape[0], 1, shape[1])
        rotated = {".attn_q.": config.num_heads, ".attn_k.": config.num_kv_heads}
        heads = next((number for part, number in rotated.items() if part in stored), 0)
        rows = None
        if self._family.neighbours_rotated and heads and found.tensor.n_elements:  # else a shape may say anything
            rows = np.arange(shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        block = config.block
        if block is not None and block.by_head and ".attn_qkv." in stored:
            rows = _rows_by_head(config, shape[0])
        # The converter adds what the model would add to its norms.
        offset = config.norm_offset if stored.endswith("norm.weight") else 0.0
        transposed = block is not None and block.transposed and len(shape) == 2 and stored.startswith("blk.")
        return found._replace(stored=shape, rows=rows, offset=offset, transposed=transposed)


def _has_row(config: DecoderConfig) -> bool:
    """True if the bias of the experts' choice is [1, E]."""
    return config.experts is not None and config.experts.traits.correction_row


def _rows_by_head(config: DecoderConfig, size: int) -> np.ndarray | None:
    """Order of rows that the file has as all queries, all keys and all values, and the checkpoint by KV head."""
    import numpy as np

    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    if size != (heads + 2 * kv_heads) * dim:
        return None  # the error tells the two shapes
    rows = np.arange(size).reshape(-1, dim)
    parts = [part.reshape(kv_heads, -1, dim) for part in np.split(rows, [heads, heads + kv_heads])]
    return np.concatenate(parts, 1).reshape(-1)


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


def _alternating(gate: Tensor, up: Tensor) -> Tensor:
    """Rows [2I, ...] of gate and up in turn."""
    import torch

    return torch.stack((gate, up), 1).flatten(0, 1)


def _heads(keys: Tensor, values: Tensor) -> Tensor:
    """Weight [H · (N + V), L] from keys [H, L, N] and values [H, V, L]."""
    import torch

    return torch.cat((keys.mT, values), 1).flatten(0, 1)
