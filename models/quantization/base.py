"""Contract of a quantisation format, and what formats share: stored parts of a module to one `QuantizedWeight`.

O outputs, I inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...kernels.quantized_linear import QuantizedWeight
from ...platform.core.errors import InvalidRequestError, UnsupportedModelError
from ..checkpoint.weight_files import StoredTensor
from ..config_values import shown, wrong
from ..layers.weights import Weight

FIELD = "quantization_config"


@dataclass(frozen=True, slots=True)
class Format:
    """Format of a checkpoint: how its packed tensors become weights. Made once, from config.json."""

    method: str
    """The `quant_method` of config.json."""
    name: str
    """Name for users, such as "gptq 4 bits"."""
    parts: tuple[str, ...]
    """Last parts of the names of the tensors that a packed weight consists of, such as "qweight"; a module has a packed
    weight when it has a tensor with one of the `markers`, or without such with the first one."""
    describe: Callable[[Parts], StoredTensor]
    """Check the parts' shapes and return the weight [O, I]; raises ValueError."""
    markers: tuple[str, ...] = ()
    optional_bias: bool = False
    """True: a bias that the model does not have may be stored, if it is zero."""

    @property
    def endings(self) -> tuple[str, ...]:
        """Ends of the names of tensors that show a packed weight."""
        return tuple(f".{name}" for name in self.markers or self.parts[:1])


class Parts:
    """Stored tensors of one module."""

    def __init__(self, module: str, tensors: Mapping[str, StoredTensor]) -> None:
        self.module = module
        """Name in the checkpoint, such as "model.layers.0.mlp.up_proj"."""
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> Iterable[str]:
        """Last parts of the tensors' names."""
        return self._tensors

    def shape(self, name: str, dimensions: int | None = None) -> tuple[int, ...]:
        """Shape of a tensor that must be there."""
        if name not in self._tensors:
            raise ValueError(f"there is no {name}")
        shape = self._tensors[name].shape
        if dimensions is not None and len(shape) != dimensions:
            raise ValueError(f"{name} has the shape {list(shape)}, it must have {dimensions} dimensions")
        return shape

    def check(self, name: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """Check that the tensor has one of the shapes, and return its shape."""
        shape = self.shape(name)
        if shape not in shapes:
            wanted = " or ".join(str(list(allowed)) for allowed in shapes)
            raise ValueError(f"{name} has the shape {list(shape)} instead of {wanted}")
        return shape

    def read(self, name: str, *dtypes: torch.dtype) -> Tensor:
        """Read a tensor of one of the dtypes."""
        tensor = self._tensors[name].read()
        if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes:
            found = str(getattr(tensor, "dtype", "packed")).removeprefix("torch.")
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"{name} is {found}, it must be {wanted}")
        return tensor

    def floats(self, name: str) -> Tensor:
        """Read finite numbers as float32."""
        values = self.read(name, torch.float32, torch.float16, torch.bfloat16).float()
        if not values.isfinite().all():
            raise ValueError(f"{name} has numbers that are not finite")
        return values


def unpack(
    tensors: Mapping[str, StoredTensor],
    form: Format,
    known: Callable[[str], bool],
    param: str,
    *,
    transposed: bool = False,
) -> dict[str, StoredTensor]:
    """Tensors of a checkpoint in which weights stand for their packed parts.

    Args:
        known: True for names of tensors that the model has.
        param: Parameter that errors name.
        transposed: True for a model whose plain weights are stored as [I, O] (GPT-2); packed ones never are.

    Raises:
        InvalidRequestError: parts are missing or of the wrong shape, or nothing is packed; the message names them.
    """
    modules = {name[: -len(ending)] for name in tensors for ending in form.endings if name.endswith(ending)}
    if not modules:
        raise InvalidRequestError(
            f"config.json says that weights are quantized ({form.name}), but there is no tensor *{form.endings[0]}",
            param=param,
        )
    found = dict(tensors)
    for module in sorted(modules):
        names = {part: f"{module}.{part}" for part in form.parts if f"{module}.{part}" in tensors}
        parts = Parts(module, {part: found.pop(name) for part, name in names.items()})
        with _errors(module, param):
            weight = form.describe(parts)
        shape = weight.shape[::-1] if transposed else weight.shape
        found[f"{module}.weight"] = StoredTensor(shape, partial(_read, weight, module, param, transposed=transposed))
        bias = f"{module}.bias"
        if form.optional_bias and bias in found and not known(bias):
            with _errors(module, param):
                if found.pop(bias).dense().any():
                    raise ValueError("the model has no bias here, but the file has one that is not zero")
    return found


def _read(weight: StoredTensor, module: str, param: str, *, transposed: bool) -> Weight:
    with _errors(module, param):
        value = weight.read()
        numbers = value if isinstance(value, Tensor) else value.scales
        offsets = None if isinstance(value, Tensor) else value.offsets
        if not all(tensor is None or tensor.isfinite().all() for tensor in (numbers, offsets)):
            raise ValueError("its scales or zero points make numbers that are not finite")
        return value.t() if transposed and isinstance(value, Tensor) else value


@contextmanager
def _errors(module: str, param: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(f"the packed weight of {module} cannot be read: {error}", param=param) from error


def unpack_codes(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Unpack int32 [R, C], whose lowest bits come first, to codes [R, columns] uint8 of 4 or 8 bits."""
    octets = packed.contiguous().view(torch.uint8)
    if bits == 4:
        octets = torch.stack((octets & 15, octets >> 4), -1).flatten(1)
    return octets[:, :columns]


@dataclass(frozen=True, slots=True)
class Grouped:
    """Codes [O, I] uint8 of integers, with a scale and maybe a zero point for each group of inputs."""

    bits: int
    codes: Tensor
    scales: Tensor
    """[O, G] float32."""
    group: int
    zeros: Tensor | None = None
    """[O, G] uint8; None: 2 ** (bits - 1)."""
    group_index: Tensor | None = field(default=None)
    """[I]: group of each input; None: in order."""

    def weight(self) -> QuantizedWeight:
        """Canonical form, (code - zero) · scale.

        Raises:
            ValueError: groups are not of the size that the config says.
        """
        codes, order = self.codes, self._order()
        if order is not None:
            codes = codes.index_select(1, order)
        middle = 1 << (self.bits - 1)
        offsets: Tensor | None = None
        if self.bits == 8 and (self.zeros is None or bool((self.zeros == middle).all())):
            codes = (codes ^ middle).view(torch.int8)
        elif self.zeros is None:
            offsets = self.scales * -middle
        else:
            offsets = self.scales * -self.zeros.float()
        return QuantizedWeight(
            bits=self.bits, codes=codes, scales=self.scales, group=self.group, offsets=offsets, order=order
        )

    def _order(self) -> Tensor | None:
        if self.group_index is None:
            return None
        index = self.group_index.long()
        expected = torch.arange(len(index)) // self.group
        if torch.equal(index, expected):
            return None
        order = torch.argsort(index, stable=True)
        if not torch.equal(index[order], expected):
            raise ValueError(f"g_idx does not put {self.group} inputs into each group")
        return order


def num_groups(inputs: int, group_size: int) -> tuple[int, int]:
    """Inputs of a group and number of groups; a size of -1 stands for all inputs."""
    group = max(1, inputs if group_size == -1 else min(group_size, inputs))
    return group, -(-inputs // group)


def unsupported(option: str, value: object, served: str) -> UnsupportedModelError:
    """Error about an option of the quantization_config."""
    return wrong(f"{FIELD}.{option}", f"({shown(value)}) is not supported; supported is {served}")


def choice(values: Mapping[str, Any], option: str, served: tuple[Any, ...], default: Any) -> Any:
    """The option, which must be one of those served."""
    value = values.get(option, default)
    if value not in served or type(value) not in map(type, served):
        raise unsupported(option, value, " or ".join(map(str, served)))
    return value


def group_size(values: Mapping[str, Any], option: str, default: int) -> int:
    """The option as a number of inputs, or -1 for all of them."""
    value = values.get(option, default)
    if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or 0 < value < 1 << 24):
        raise unsupported(option, value, "-1 or a positive integer")
    return value
