"""Messages from rank 0 to another rank, over a socket: JSON (`platform.core.wire`), then arrays as raw bytes.

rank 0                                     rank
RankSpec                             ->
                                     <-    {} or {"error": [...]}     it has started, and waits for the others
                                     <-    {} or {"error": [...]}     it has joined the others
                                     <-    {"weight_bytes": N} or {"error": [...]}     its weights are loaded
Message("allocate" | "forward" | "replay" | ...) ->         one after another, no answers
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ....lora.device.layout import LM_HEAD, SCORE, ModelLayout, OwnRows, PackedModules, PackedRows
from ....models.batch import SequenceRows
from ...core.batch import RowStates
from ...core.wire import receive, receive_into, send


class RankSpec(NamedTuple):
    """Facts that a rank needs to load its share."""

    rank: int
    size: int
    store: list[Any]
    """See `collectives.open_store`."""
    address: str
    """See `RankSite`."""
    path: str
    dtype: str
    device: str
    device_index: int
    load_format: str
    quantization: str | None
    """See `ModelOptions`."""
    seed: int
    num_threads: int
    """Threads that compute, on a CPU."""
    log_level: int


class Message(NamedTuple):
    """Work for a rank."""

    verb: str
    arguments: list[Any] = []  # noqa: RUF012  (never changed)
    """Values of JSON."""
    arrays: Sequence[NDArray[Any]] = ()


def send_message(link: socket.socket, message: Message) -> None:
    """Send a message; OSError when the rank is gone."""
    arrays = [np.ascontiguousarray(array) for array in message.arrays]
    send(link, [message.verb, message.arguments, [array.nbytes for array in arrays]])
    for array in arrays:
        if array.nbytes:
            link.sendall(array.reshape(-1).view(np.uint8).data)


def receive_message(link: socket.socket) -> Message:
    """Wait for a message, whose arrays are bytes; EOFError or OSError when rank 0 is gone."""
    (verb, arguments, sizes), _ = receive(link)
    arrays = []
    for size in sizes:
        array = np.empty(size, np.uint8)
        receive_into(link, memoryview(array.data))
        arrays.append(array)
    return Message(verb, arguments, arrays)


def encode_rows(rows: SequenceRows, token_ids: list[int]) -> tuple[list[int], NDArray[np.int32]]:
    """Rows with these tokens as one array, and the lengths of its parts."""
    states: list[int] = []  # of each row: two lengths, and what they count
    for row in rows.states:
        states += [len(row.ring), len(row.snapshots), row.num_kept, *row.origin, *row.ring]
        states += itertools.chain.from_iterable(row.snapshots)
    parts = [token_ids, rows.query_lens, rows.starts, list(rows.prompt_lens), states, *rows.block_tables]
    return [len(part) for part in parts], np.fromiter(itertools.chain.from_iterable(parts), np.int32)


def decode_rows(lengths: list[int], array: NDArray[np.uint8]) -> SequenceRows:
    """Rows of `encode_rows`."""
    numbers = iter(array.view(np.int32).tolist())
    token_ids, query_lens, starts, prompt_lens, states, *tables = (list(itertools.islice(numbers, n)) for n in lengths)
    of_rows = list(_decode_states(states))
    return SequenceRows(token_ids, query_lens, starts, tables, prompt_lens=prompt_lens, states=of_rows)


def _decode_states(numbers: list[int]) -> Iterator[RowStates]:
    rest = iter(numbers)
    for ring_size in rest:
        num_snapshots, num_kept, *origin = itertools.islice(rest, 4)
        ring = list(itertools.islice(rest, ring_size))
        pairs = list(itertools.islice(rest, 2 * num_snapshots))
        yield RowStates(ring, num_kept, (origin[0], origin[1]), list(zip(pairs[::2], pairs[1::2], strict=True)))


def encode_packed(packed: PackedModules) -> tuple[list[Any], list[NDArray[Any]]]:
    """Weights of an adapter, except its own rows of head and score matrix, which only rank 0 has."""
    parts = packed[:2]
    arrays = [array for part in parts for array in (part.data.view(torch.uint8).numpy(), part.live)]
    own = {name: rows for name, rows in packed.own_rows.items() if name not in (LM_HEAD, SCORE)}
    arrays += [rows.weight.view(torch.uint8).numpy() for rows in own.values()]
    vectors = packed.gains, packed.biases
    arrays += [vector.float().numpy() for named in vectors for vector in named.values()]
    facts_of_own = [
        [name, len(rows.weight), None if rows.tokens is None else rows.tokens.tolist(), rows.vocab_size]
        for name, rows in own.items()
    ]
    return [[[part.spans, len(part.data)] for part in parts], facts_of_own, *map(list, vectors)], arrays


def decode_packed(facts: list[Any], arrays: Sequence[NDArray[np.uint8]], layout: ModelLayout) -> PackedModules:
    """Weights of `encode_packed`, in a layout built by the same calls."""
    parts, own, gains, biases = facts
    rest, found = iter(arrays), []
    for (spans, count), rows in zip(parts, layout, strict=True):
        data, live = next(rest), next(rest)
        width = sum(stop - start for start, stop in spans)
        matrix = torch.empty(count, width, dtype=rows.dtype)
        if count:
            matrix = torch.from_numpy(data).view(rows.dtype).view(count, width)
        pairs = tuple((start, stop) for start, stop in spans)
        found.append(PackedRows(rows, pairs, matrix, live.reshape(count, len(rows.pieces))))
    linears, vocabulary = found
    own_rows = {}
    for name, count, tokens, vocab_size in own:
        weight = torch.from_numpy(next(rest)).view(layout.dtype).view(count, -1)
        own_rows[name] = OwnRows(weight, None if tokens is None else torch.tensor(tokens), vocab_size)

    def vectors(names: list[str]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(next(rest)).view(torch.float32) for name in names}

    return PackedModules(linears, vocabulary, vectors(gains), vectors(biases), own_rows)
