"""Log-probabilities in the formats of the two OpenAI APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.outputs import Logprob

FLOOR = -9999.0
"""JSON has no minus infinity."""

Entries = dict[int, Logprob]


def _value(entry: Logprob) -> float:
    return max(entry.logprob, FLOOR)


def _text(token_id: int, entry: Logprob) -> str:
    return entry.decoded_token if entry.decoded_token is not None else f"token_id:{token_id}"


def _top(entries: Entries, count: int) -> list[tuple[int, Logprob]]:
    """The `count` most likely; `entries` may hold the chosen token beside them."""
    return sorted(entries.items(), key=lambda item: (item[1].rank, -item[1].logprob))[:count]


class CompletionLogprobs:
    """Builds `choices[].logprobs` of `/v1/completions`; keeps the text offset between the chunks of a stream."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._offset = 0

    def build(
        self, token_ids: Sequence[int], entries: Sequence[Entries | None], texts: Sequence[str]
    ) -> dict[str, Any]:
        """The object for these tokens. `entries[i]` is None where nothing is known (the first prompt token), and then
        `texts[i]` is shown."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, entry, text in zip(token_ids, entries, texts, strict=True):
            if entry is None:
                values.append(None)
                tops.append(None)
            else:
                chosen = entry[token_id]
                text = _text(token_id, chosen)
                values.append(_value(chosen))
                top = {_text(i, e): _value(e) for i, e in _top(entry, self._count)}
                top.setdefault(text, _value(chosen))
                tops.append(top)
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(token_ids: Sequence[int], entries: Sequence[Entries], count: int) -> dict[str, Any]:
    """`choices[].logprobs` of `/v1/chat/completions`, with the `count` most likely tokens at each position."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        item = _chat_item(token_id, entry[token_id])
        item["top_logprobs"] = [_chat_item(i, e) for i, e in _top(entry, count)]
        content.append(item)
    return {"content": content, "refusal": None}


def _chat_item(token_id: int, entry: Logprob) -> dict[str, Any]:
    text = _text(token_id, entry)
    return {"token": text, "logprob": _value(entry), "bytes": list(text.encode("utf-8", "surrogatepass"))}


def prompt_logprobs(entries: Sequence[Entries | None]) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: for each prompt token, token id -> logprob, rank and text."""
    return [
        None
        if entry is None
        else {
            str(i): {"logprob": _value(e), "rank": e.rank, "decoded_token": e.decoded_token} for i, e in entry.items()
        }
        for entry in entries
    ]
