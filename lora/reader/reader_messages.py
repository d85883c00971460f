"""Messages between the engine's process and its reader process, over a Unix socket.

    engine's process                      reader process
                                   <-     {}                        it has started
    Setup, flag of long steps      ->
    AdapterSource                  ->
                                   <-     {"adapter": ...}, memory  the adapter; its rows are in a sealed memfd
                                   <-     {"error": [...]}          the adapter cannot be served
                                   <-     {"unable": reason}        the engine's process must read it

Messages are JSON, see `platform.core.wire`. The rows of an adapter are in its memory one part after another, as the
host tier keeps them; the message has their offsets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.native import loaded
from ..adapter import Adapter
from ..device.dora import BaseWeight
from ..device.layout import ALIGNMENT, ModelLayout, PackedModules, PackedRows, RowLayout
from ..files.folder import AdapterFiles
from ..files.tensor_keys import ModelModules, ModuleShape


class Setup(NamedTuple):
    """Arguments of `AdapterFiles` as plain values."""

    parent: int
    """The engine's process id. The reader ends when this process is gone."""
    models: list[Any]
    """The target and the drafter, see `_describe_model`."""
    draft_method: str
    max_rank: int
    dtype: str
    native: bool
    """True when the engine's process has loaded the native kernels."""


# --- the setup ---


def describe(parent: int, files: AdapterFiles) -> Setup:
    """Describe a reader that reads what `files` reads."""
    return Setup(
        parent,
        [_describe_model(files.target), _describe_model(files.drafter)],
        files.draft_method,
        files.max_rank,
        str(files.target.layout.dtype).removeprefix("torch."),
        loaded() is not None,
    )


def _describe_model(model: ModelModules) -> list[Any]:
    """Describe the modules, and the sites of both layouts."""
    modules = [
        [name, *shape[:3], shape.is_base is not None, shape.base is not None] for name, shape in model.shapes.items()
    ]
    return [modules, *(layout.sites for layout in model.layout)]


def make_files(setup: Setup, base: BaseWeight, is_base: Callable[[Tensor], bool]) -> AdapterFiles:
    """Make the reader of a setup; `base` and `is_base` replace those of every module that has them."""
    dtype = getattr(torch, setup.dtype)

    def make_layout(sites: list[Any]) -> RowLayout:
        layout = RowLayout(dtype)
        for site in sites:
            layout.reserve(*site)
        return layout

    def make_model(modules: list[Any], linears: list[Any], vocabulary: list[Any]) -> ModelModules:
        shapes = {
            name: ModuleShape(inputs, outputs, embedding, is_base if has_copy else None, base if has_base else None)
            for name, inputs, outputs, embedding, has_copy, has_base in modules
        }
        return ModelModules(shapes, ModelLayout(make_layout(linears), make_layout(vocabulary)))

    target, drafter = (make_model(*model) for model in setup.models)
    return AdapterFiles(target, drafter, draft_method=setup.draft_method, max_rank=setup.max_rank)


# --- adapters ---


def encode_adapter(adapter: Adapter) -> tuple[dict[str, Any], list[memoryview]]:
    """Return the message about an adapter, and the contents of its memory. Only rank rows are sent."""
    assert all(part.is_plain for part in adapter.packed)
    buffers: list[memoryview] = []
    offset, parts = 0, []
    for rows in (rows for packed in adapter.packed for rows in packed[:2]):
        parts.append({"spans": rows.spans, "rows": len(rows.data), "offset": offset})
        for content in (rows.data.view(torch.uint8).numpy().reshape(-1).data, rows.live.reshape(-1).data):
            padding = -content.nbytes % ALIGNMENT
            buffers += [content, memoryview(bytes(padding))]
            offset += content.nbytes + padding
    message = {"digest": adapter.digest.hex(), "draft": adapter.draft, "parts": parts, "size": offset}
    message["left_out"] = adapter.target.left_out
    return message, [buffer for buffer in buffers if buffer.nbytes]


def decode_adapter(message: dict[str, Any], memory: int, files: AdapterFiles) -> Adapter:
    """Return the adapter of a message, as views of its memory. The descriptor `memory` may be closed then.

    Raises:
        OSError, RuntimeError: the memory cannot be mapped. LookupError, TypeError, ValueError: it is no such message.
    """
    # Mapped privately: the file cannot shrink or change (it is sealed), and nothing here writes.
    mapped = torch.from_file(f"/proc/self/fd/{memory}", shared=False, size=message["size"], dtype=torch.uint8)
    parts = iter(message["parts"])

    def unpack(layout: ModelLayout) -> PackedModules:
        linears, vocabulary = (_view(next(parts), mapped, rows) for rows in layout)
        return PackedModules(linears, vocabulary)

    target, drafter = unpack(files.target.layout), unpack(files.drafter.layout)
    target = target._replace(left_out=tuple(message["left_out"]))
    return Adapter(bytes.fromhex(message["digest"]), target, drafter, message["draft"])


def _view(part: dict[str, Any], mapped: Tensor, layout: RowLayout) -> PackedRows:
    spans, num_rows = tuple((start, stop) for start, stop in part["spans"]), part["rows"]
    num_modules = len(layout.pieces)
    if not num_rows:
        return layout.pack({})
    width = sum(stop - start for start, stop in spans)
    size, start = num_rows * width * layout.dtype.itemsize, part["offset"]
    data = mapped[start : start + size].view(layout.dtype).view(num_rows, width)
    start += size + -size % ALIGNMENT
    live = mapped[start : start + num_rows * num_modules].numpy().reshape(num_rows, num_modules)
    return PackedRows(layout, spans, data, live)
