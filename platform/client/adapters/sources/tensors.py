"""Tensors and a configuration of this process -> the two files of an adapter."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch

from .....lora.files.tensor_file import DTYPES
from ....core.errors import AdapterError
from ....core.sampling_params import quote_for_error

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8
"""The data of a safetensors file begin at a multiple of this."""


def tensor_pieces(tensors: Mapping[str, Any], expect: Callable[[int], Any]) -> Iterator[memoryview]:
    """A safetensors file, in pieces: its header, then each tensor, which is copied from its device when its turn
    comes. `safetensors.torch.save` would hold all of them at once, and takes no tensors that share memory.
    `expect` gets the size of the tensors first.

    Raises:
        AdapterError: one is no tensor, or of a dtype or layout that cannot be written.
    """
    header: dict[str, Any] = {}
    offset = 0
    for key, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise _error(key, f"must be a torch.Tensor, got {quote_for_error(tensor)}")
        if tensor.dtype not in _NAMES or tensor.layout is not torch.strided or tensor.is_meta:
            raise _error(key, f"has dtype {tensor.dtype} and layout {tensor.layout} on {tensor.device}: not served")
        stop = offset + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": _NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [offset, stop]}
        offset = stop
    expect(offset)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for key, tensor in tensors.items():
        if not tensor.numel():
            continue
        try:
            plain = tensor.detach().to("cpu").resolve_neg().contiguous().reshape(-1)
            yield plain.view(torch.uint8).numpy().data
        except (RuntimeError, TypeError) as error:  # such as a device that has failed
            raise _error(key, f"cannot be copied: {str(error)[:200]}") from error


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """adapter_config.json of PEFT's fields, in which sets and enumerations are taken as PEFT writes them.

    Raises:
        AdapterError: a field is no JSON.
    """
    try:
        return json.dumps(config, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise AdapterError(f"peft_config cannot be written as JSON: {str(error)[:200]}", param="peft_config") from None


def _plain(value: object) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"a {type(value).__name__} is no JSON")


def _error(key: str, problem: str) -> AdapterError:
    return AdapterError(f"lora_tensors[{quote_for_error(key)}] {problem}", param="lora_tensors")
