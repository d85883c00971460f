"""Messages that the engine's process and its reader process send to each other, over a Unix socket.

    engine's process                      reader process
                                   <-     {}                        it has started
    Setup, signal                  ->
    source                         ->
                                   <-     {"adapter": ...}, memory  read: its rows in a sealed memfd
                                   <-     {"error": [...]}          cannot be served
                                   <-     {"unable": reason}        not to be read here, as far as that is known

A message is 8 bytes that say its length, and JSON. The rows of an adapter lie in its memory one part after another, in
the form in which the host tier keeps them; the message says where.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.native import loaded
from ..adapter import Adapter
from ..device.dora import BaseWeight
from ..device.layout import ALIGNMENT, ModelLayout, PackedModules, PackedRows, RowLayout
from ..files.folder import AdapterFiles
from ..files.weights import ModuleShape

_LENGTH = struct.Struct("<Q")
_INT = struct.Struct("i")
_CHUNK = 1 << 20


class Setup(NamedTuple):
    """All that reading takes, beside a folder: plain values."""

    parent: int
    """The engine's process id: when it is gone, so is the reader."""
    files: dict[str, Any]
    layouts: list[dict[str, Any]]
    """The target's, and the drafter's."""
    native: bool
    """True when the engine's process has loaded the native kernels."""


class ReadyRows(NamedTuple):
    """An adapter as the reader hands it over."""

    adapter: Adapter
    """Without its tensors."""
    packed: tuple[PackedModules, ...]
    """The target's and the drafter's, views of shared memory that goes with the last of them."""


# --- what adapters are for ---


def describe(parent: int, files: AdapterFiles, layouts: Sequence[ModelLayout]) -> Setup:
    """The setup of a reader that reads what `files` read and packs it as `layouts` do."""
    draft = files.draft
    return Setup(
        parent,
        {
            "modules": _describe_modules(files.modules.items()),
            "draft_method": "" if draft is None else draft.method,
            "draft_modules": [] if draft is None else _describe_modules(draft.modules.items()),
            "max_rank": files.max_rank,
            "dtype": str(files.dtype).removeprefix("torch."),
        },
        [{"linears": layout.linears.sites, "vocabulary": layout.vocabulary.sites} for layout in layouts],
        loaded() is not None,
    )


def _describe_modules(modules: Iterable[tuple[str, ModuleShape]]) -> list[list[Any]]:
    return [
        [
            name,
            shape.in_features,
            shape.out_features,
            shape.embedding,
            shape.is_base is not None,
            shape.base is not None,
        ]
        for name, shape in modules
    ]


def make_files(setup: Setup, base: BaseWeight, is_base: Callable[[Tensor], bool], layout: ModelLayout) -> AdapterFiles:
    """Reader of adapters; `base` and `is_base` stand for those of each module that has some. `layout`: the target's
    rows."""

    def shapes(modules: list[list[Any]]) -> dict[str, ModuleShape]:
        return {
            name: ModuleShape(inputs, outputs, embedding, is_base if has_copy else None, base if has_base else None)
            for name, inputs, outputs, embedding, has_copy, has_base in modules
        }

    given = setup.files
    return AdapterFiles(
        shapes(given["modules"]),
        given["draft_method"],
        shapes(given["draft_modules"]),
        max_rank=given["max_rank"],
        dtype=getattr(torch, given["dtype"]),
        layout=layout,
    )


def make_layouts(setup: Setup) -> list[ModelLayout]:
    """Layouts that pack them."""
    dtype = getattr(torch, setup.files["dtype"])

    def layout(sites: list[tuple[list[str], int, list[int]]]) -> RowLayout:
        rows = RowLayout(dtype)
        for names, in_features, sizes in sites:
            rows.reserve(names, in_features, sizes)
        return rows

    return [ModelLayout(layout(given["linears"]), layout(given["vocabulary"])) for given in setup.layouts]


# --- adapters ---


def _parts(packed: Iterable[PackedModules]) -> Iterator[PackedRows]:
    for part in packed:
        yield from (part.linears, part.vocabulary)


def encode_adapter(adapter: Adapter, packed: Sequence[PackedModules]) -> tuple[dict[str, Any], list[memoryview]]:
    """The message about an adapter, and the contents of its memory. Gains are not served: they need the base."""
    assert not any(part.gains for part in packed)
    buffers: list[memoryview] = []
    offset, parts = 0, []
    for part in _parts(packed):
        parts.append({"spans": part.spans, "rows": len(part.data), "offset": offset})
        for content in (part.data.view(torch.uint8).numpy().reshape(-1).data, part.live.reshape(-1).data):
            padding = -content.nbytes % ALIGNMENT
            buffers += [content, memoryview(bytes(padding))]
            offset += content.nbytes + padding
    message = {
        "digest": adapter.digest.hex(),
        "rows": adapter.rows,
        "draft": adapter.draft,
        "parts": parts,
        "size": offset,
    }
    return message, [buffer for buffer in buffers if buffer.nbytes]


def decode_adapter(message: dict[str, Any], memory: int, layouts: Sequence[ModelLayout]) -> ReadyRows:
    """The adapter of a message, whose rows are those in `memory`, a file's descriptor that may be closed then.

    Raises:
        OSError, RuntimeError: the memory cannot be mapped. LookupError, TypeError, ValueError: it is no such message.
    """
    # Mapped privately: the file cannot shrink or change (it is sealed), and nothing here writes.
    mapped = torch.from_file(f"/proc/self/fd/{memory}", shared=False, size=message["size"], dtype=torch.uint8)
    parts = iter(message["parts"])
    packed = tuple(
        PackedModules(_view(next(parts), mapped, layout.linears), _view(next(parts), mapped, layout.vocabulary), {})
        for layout in layouts
    )
    adapter = Adapter(
        bytes.fromhex(message["digest"]),
        message["rows"],
        {},
        draft=message["draft"],
    )
    return ReadyRows(adapter, packed)


def _view(part: dict[str, Any], mapped: Tensor, layout: RowLayout) -> PackedRows:
    spans, num_rows = tuple((start, stop) for start, stop in part["spans"]), part["rows"]
    num_modules = len(layout.pieces)
    if not num_rows:
        return PackedRows((), torch.zeros(0, 0, dtype=layout.dtype), np.zeros((0, num_modules), np.uint8))
    width = sum(stop - start for start, stop in spans)
    size, start = num_rows * width * layout.dtype.itemsize, part["offset"]
    data = mapped[start : start + size].view(layout.dtype).view(num_rows, width)
    start += size + -size % ALIGNMENT
    live = mapped[start : start + num_rows * num_modules].numpy().reshape(num_rows, num_modules)
    return PackedRows(spans, data, live)


# --- the socket ---


def send(connection: socket.socket, message: Any, memory: int | None = None) -> None:
    """Send a message, with the descriptor of a file."""
    content = json.dumps(message).encode()
    data = memoryview(_LENGTH.pack(len(content)) + content)
    if memory is not None:
        data = data[socket.send_fds(connection, [data], [memory]) :]
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Wait for a message; with the descriptors that came with it, which are the caller's to close.

    Raises:
        EOFError: the other process is gone. OSError: so it is, or the socket's timeout has passed.
    """
    # Not `recv_fds`, which forgets the flag: descriptors must not be inherited by the programs that others start.
    header, ancillary, _, _ = connection.recvmsg(_LENGTH.size, socket.CMSG_LEN(_INT.size), socket.MSG_CMSG_CLOEXEC)
    found = [
        _INT.unpack(data[: _INT.size])[0]
        for level, kind, data in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
    ]
    try:
        header += _receive(connection, _LENGTH.size - len(header)) if header else b""
        if not header:
            raise EOFError("the other process is gone")
        return json.loads(_receive(connection, *_LENGTH.unpack(header))), found
    except BaseException:
        for descriptor in found:
            os.close(descriptor)
        raise


def _receive(connection: socket.socket, size: int) -> bytes:
    """Read exactly this many bytes, none of the next message's."""
    content = bytearray()
    while len(content) < size:
        data = connection.recv(min(_CHUNK, size - len(content)))
        if not data:
            raise EOFError("the other process is gone")
        content += data
    return bytes(content)
