"""Documents to token rows: encoding with a loss weight for each token, and packing whole documents into rows."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from .config import ASSISTANT, BOS, END, PROMPT_WEIGHT, SPECIAL_TOKENS
from .documents import Document

BOS_ID, END_ID, ASSISTANT_ID = (SPECIAL_TOKENS.index(token) for token in (BOS, END, ASSISTANT))


class Encoded(NamedTuple):
    """A document as tokens, and the loss weight of each token."""

    ids: list[int]
    weights: list[float]


class Batch(NamedTuple):
    """Rows of packed documents, both ``[rows, length]``; padding has weight zero."""

    ids: torch.Tensor
    weights: torch.Tensor


class Encoder:
    """Encodes documents exactly as the chat template and the tokenizer do."""

    def __init__(self, tokenizer: Tokenizer, prompt_weight: float = PROMPT_WEIGHT) -> None:
        self._tokenizer = tokenizer
        self._prompt_weight = prompt_weight

    def plain(self, text: str) -> list[int]:
        """Return the tokens of a text without the leading one."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def __call__(self, document: Document) -> Encoded:
        """Return the document's tokens from the leading one to the one that ends it."""
        ids, weights = [BOS_ID], [0.0]
        if not document.messages:
            body = self.plain(document.text)
            return Encoded(ids + body + [END_ID], weights + [1.0] * (len(body) + 1))
        for role, content in document.messages:
            head, body = self.plain(f"<|{role}|>\n"), self.plain(content)
            weight = 1.0 if role == "assistant" else self._prompt_weight
            ids += [*head, *body, *self.plain("<|end|>\n")]
            weights += [0.0] * len(head) + [weight] * (len(body) + 1) + [0.0]
        return Encoded(ids, weights)


def pack(rng: Random, documents: list[Encoded], rows: int, length: int) -> Batch:
    """Pack whole documents into rows.

    The longest are placed first, each into the first row with room, and what fits nowhere is left out. Within a row
    they are shuffled, so that short documents start rows as often as long ones.
    """
    bins: list[list[Encoded]] = [[] for _ in range(rows)]
    room = [length] * rows
    for document in sorted(documents, key=lambda d: -len(d.ids)):
        size = min(len(document.ids), length)
        row = next((r for r in range(rows) if room[r] >= size), None)
        if row is not None:
            bins[row].append(document)
            room[row] -= size
    ids = torch.zeros(rows, length, dtype=torch.long)
    weights = torch.zeros(rows, length)
    for row, content in enumerate(bins):
        rng.shuffle(content)
        row_ids = [token for document in content for token in document.ids][:length]
        row_weights = [weight for document in content for weight in document.weights][:length]
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        weights[row, : len(row_weights)] = torch.tensor(row_weights)
    return Batch(ids, weights)


def draw_batch(
    rng: Random, draw: Callable[[Random], Document], encode: Callable[[Document], Encoded], rows: int, length: int
) -> Batch:
    """Draw documents until they fill the rows, and pack them."""
    documents: list[Encoded] = []
    total = 0
    while total < rows * length:
        documents.append(encode(draw(rng)))
        total += min(len(documents[-1].ids), length)
    return pack(rng, documents, rows, length)
