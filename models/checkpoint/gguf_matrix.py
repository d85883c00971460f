"""Tensor of a GGUF file, and what its converter did to the one in the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .gguf_reader import reading

if TYPE_CHECKING:
    import numpy as np

    from ..layers.weights import Weight


class Matrix(NamedTuple):
    """Tensor in a GGUF file, and what its converter did to the one in the checkpoint."""

    path: Path
    tensor: Any
    stored: tuple[int, ...]
    """Shape in the file, with or without sizes of 1."""
    part: int | None = None
    """Index of the part of the tensor, such as an expert's."""
    rows: np.ndarray | None = None
    """[rows] index in the file of each row; None: they are in their order."""
    columns: np.ndarray | None = None
    """[columns] index in the file of each column; None: they are in their order."""
    offset: float = 0.0
    """Number that the converter added to all elements."""
    negated_exp: bool = False
    """True: each element x became -exp(x)."""
    transposed: bool = False
    """True: the checkpoint has the transposed matrix."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the checkpoint."""
        shape = self.stored if self.rows is None else (len(self.rows), *self.stored[1:])
        return shape[::-1] if self.transposed else shape

    def of_part(self, index: int) -> Matrix:
        """One of the tensors that are stacked in this one."""
        return self._replace(part=index, stored=self.stored[1:])

    def read(self) -> Weight:
        """The checkpoint's tensor; a matrix of a quantised type stays packed unless the converter changed its
        numbers."""
        import torch

        from ..quantization.gguf_blocks import read_blocks

        with reading(self.path, f"the tensor {self.tensor.name}"):
            import gguf
            import numpy as np

            data = self.tensor.data if self.part is None else self.tensor.data[self.part]
            if len(self.stored) == 2 and not self.transposed and not self.offset:
                packed = read_blocks(self.tensor.tensor_type.name, data, self.stored)
                if packed is not None and self.columns is not None:
                    packed = packed.take_columns(torch.from_numpy(self.columns))
                if packed is not None:
                    return packed if self.rows is None else packed.take(torch.from_numpy(self.rows))
            values = gguf.dequantize(data, self.tensor.tensor_type).reshape(self.stored)
            if self.rows is not None:
                values = values[self.rows]
            if self.columns is not None:
                values = values[:, self.columns]
            if self.offset:
                values = values - np.float32(self.offset)
            if self.negated_exp:
                values = np.log(-values)
            if self.transposed:
                values = np.ascontiguousarray(values.T)
            return torch.from_numpy(np.require(values, requirements="W"))
