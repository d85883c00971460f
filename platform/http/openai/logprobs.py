"""Log-probabilities in the formats of the two OpenAI APIs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from ...core.outputs import Logprob
from .json_pieces import OBJECTS, Encode, Slices

ID_PREFIX = "token_id:"
"""Start of a token's name when it has no text, or is to be named by its id."""
FLOOR = -9999.0
"""Value written for minus infinity, which JSON does not have."""

Entries = dict[int, Logprob]
Shown: TypeAlias = int | Sequence[int]
"""Alternatives that are shown at a position: the number of the most likely ones, or these tokens."""
Packed = tuple[Any, ...]
"""Entries as one plain tuple: token id and fields of its Logprob, one after the other. It takes half of the memory, and
Python's garbage collector soon passes it by: half a million `Logprob`s take it 0.1 s, and nothing else is served."""
_WIDTH = 1 + len(Logprob._fields)


def pack(entries: Entries) -> Packed:
    """Entries as one tuple, to be kept until the answer is complete."""
    return tuple(chain.from_iterable((token_id, *entry) for token_id, entry in entries.items()))


def unpack(packed: Packed) -> Entries:
    """The reverse of `pack`."""
    return {packed[i]: Logprob(*packed[i + 1 : i + _WIDTH]) for i in range(0, len(packed), _WIDTH)}


def unpack_logprob(token_id: int, packed: Packed) -> Logprob:
    """The entry of one token."""
    start = packed[::_WIDTH].index(token_id) * _WIDTH + 1
    return Logprob(*packed[start : start + _WIDTH - 1])


def _value(entry: Logprob) -> float:
    return max(entry.logprob, FLOOR)


def token_text(token_id: int, entry: Logprob) -> str:
    """The token as an answer writes it."""
    return entry.decoded_token if entry.decoded_token is not None else f"{ID_PREFIX}{token_id}"


def _top(entries: Entries, shown: Shown) -> list[tuple[int, Logprob]]:
    """The alternatives; `entries` may hold the chosen token in addition, and those of a prompt have no given ones."""
    if not isinstance(shown, int):
        return [(token_id, entries[token_id]) for token_id in dict.fromkeys(shown) if token_id in entries]
    return sorted(entries.items(), key=lambda item: (item[1].rank, -item[1].logprob))[:shown]


class Token(NamedTuple):
    """One token of a completion, or of its echoed prompt."""

    token_id: int
    entries: Packed | None
    """None for the first prompt token, of which nothing is known."""
    shown: bool
    """False for special tokens that are left out of the answer's text."""
    text: str


class CompletionLogprobs:
    """Builder of `choices[].logprobs` of `/v1/completions`; keeps the text offset between the chunks of a stream."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._offset = 0

    def build(self, given: Sequence[Token]) -> dict[str, Any]:
        """The object for these tokens."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, packed, shown, text in given:
            if packed is None:
                values.append(None)
                tops.append(None)
            else:
                entry = unpack(packed)
                values.append(_value(entry[token_id]))
                tops.append(self._by_text(token_id, entry, text))
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(text) if shown else 0
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _by_text(self, token_id: int, entries: Entries, chosen: str) -> dict[str, float]:
        """The most likely tokens and the chosen one, which has the text `chosen`. If two have the same text, the
        less likely one is called "token_id:N"."""
        top = _top(entries, self._shown)
        if all(i != token_id for i, _ in top):
            top.append((token_id, entries[token_id]))
        result: dict[str, float] = {}
        for i, entry in top:
            text = chosen if i == token_id else token_text(i, entry)
            result[f"{ID_PREFIX}{i}" if text in result else text] = _value(entry)
        return result


class CompletionLogprobsPieces(NamedTuple):
    """The object that `builder` makes of these tokens, written in pieces."""

    builder: CompletionLogprobs
    tokens: Sequence[Token]

    def pieces(self, encode: Encode) -> Iterator[str]:
        """See `Pieces`. The object's lists are parallel, so all are made before the second one is written."""
        lists: dict[str, list[str]] = {}
        for start in range(0, max(1, len(self.tokens)), OBJECTS):
            for name, values in self.builder.build(self.tokens[start : start + OBJECTS]).items():
                lists.setdefault(name, []).append(encode(values)[1:-1])
            yield ""
        for index, (name, parts) in enumerate(lists.items()):
            yield f"{',' if index else '{'}{encode(name)}:["
            for number, part in enumerate(parts):
                yield f",{part}" if number else part
            yield "]"
        yield "}"


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[Packed], shown: Shown, *, as_ids: bool = False
) -> dict[str, Any]:
    """`choices[].logprobs` of `/v1/chat/completions`, with alternatives at each position.

    Args:
        as_ids: name tokens by their ids ("token_id:5") instead of their texts.
    """

    def make(tokens: Sequence[tuple[int, Packed]]) -> list[dict[str, Any]]:
        return [
            item(token_id, entry[token_id]) | {"top_logprobs": [item(i, e) for i, e in _top(entry, shown)]}
            for token_id, entry in ((token_id, unpack(packed)) for token_id, packed in tokens)
        ]

    item = _id_item if as_ids else _chat_item
    return {"content": Slices(list(zip(token_ids, entries, strict=True)), make), "refusal": None}


def _chat_item(token_id: int, entry: Logprob) -> dict[str, Any]:
    text = token_text(token_id, entry)
    data = entry.token_bytes if entry.token_bytes is not None else text.encode("utf-8", "surrogatepass")
    return {"token": text, "logprob": _value(entry), "bytes": list(data)}


def _id_item(token_id: int, entry: Logprob) -> dict[str, Any]:
    return {"token": f"{ID_PREFIX}{token_id}", "logprob": _value(entry), "bytes": None}


def prompt_logprobs(entries: Sequence[Entries | None]) -> Slices:
    """Field `prompt_logprobs` of vLLM: for each prompt token, token id -> logprob, rank and text."""
    return Slices(entries, _prompt_entries)


def _prompt_entries(entries: Sequence[Entries | None]) -> list[dict[str, dict[str, Any]] | None]:
    return [
        None
        if entry is None
        else {
            str(i): {"logprob": _value(e), "rank": e.rank, "decoded_token": e.decoded_token} for i, e in entry.items()
        }
        for entry in entries
    ]
