"""Prompt lookup on a device: the kernel and its reference against a plain search, over several steps."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from outrider.kernels.ngram import Rows, TokenBuffers
from outrider.kernels.ngram import torch as reference
from outrider.kernels.ngram import triton as kernels

from ..pairwise import pairwise

PATHS = pytest.mark.parametrize("path", [reference, kernels], ids=["torch", "triton"])


def searched(text: list[int], min_n: int, max_n: int, num_drafts: int) -> list[int]:
    """The definition, one comparison after the other."""
    for length in range(min(max_n, len(text) - 1), min_n - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                return (text[end:] * num_drafts)[:num_drafts]
    return text[-1:] * num_drafts


class Texts:
    """Texts of some slots, on the host and in buffers."""

    def __init__(self, device: str, num_slots: int, width: int) -> None:
        self.device = device
        self.known: dict[int, list[int]] = {slot: [] for slot in range(num_slots)}
        tokens = torch.full((num_slots, width), -9, dtype=torch.int32, device=device)
        self.buffers = TokenBuffers(tokens, torch.zeros(num_slots, dtype=torch.int64, device=device))

    def write(self, slot: int, text: list[int]) -> None:
        self.known[slot] = [*text]
        self.buffers.tokens[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        self.buffers.lengths[slot] = len(text)

    def rows(self, new: dict[int, list[int]], known: set[int]) -> Rows:
        """Rows that append the `new` tokens of slots; the host knows the lengths of the `known` ones. Rejected tokens
        follow each row's."""
        places, generated = [], []
        for slot, ids in new.items():
            places.append((slot, len(self.known[slot]) if slot in known else -1, len(generated)))
            generated += [*ids, 77, 78]
            self.known[slot] += ids
        accepted = [len(ids) - 1 for ids in new.values()]
        return Rows(*(torch.tensor(x, dtype=torch.int64, device=self.device) for x in (places, generated, accepted)))


@pytest.mark.parametrize(
    ("lengths", "vocab", "path"), pairwise([(1, 1), (1, 5), (2, 3), (4, 4)], [2, 5, 40], [reference, kernels])
)
def test_steps_of_growing_texts(device: str, path: object, lengths: tuple[int, int], vocab: int) -> None:
    rng, (min_n, max_n) = random.Random(vocab), lengths
    texts = Texts(device, 4, 400)
    for slot, length in ((3, 2), (0, 60), (1, 1)):
        texts.write(slot, [rng.randrange(vocab) for _ in range(length)])
    for step in range(8):
        slots = [0, 3, 1] if step % 2 else [1, 0]
        new = {slot: [rng.randrange(vocab) for _ in range(rng.randint(1, 5))] for slot in slots}
        rows = texts.rows(new, known={0} if step % 3 else set())
        drafts = path.extend_and_match(texts.buffers, rows, min_n, max_n, 1 + step % 4)
        assert drafts.tolist() == [searched(texts.known[slot], min_n, max_n, 1 + step % 4) for slot in slots]
    for slot, text in texts.known.items():
        assert texts.buffers.lengths[slot] == len(text)
        assert texts.buffers.tokens[slot, : len(text)].tolist() == text
        assert (texts.buffers.tokens[slot, len(text) :] == -9).all(), "only accepted tokens are written"


@PATHS
def test_texts_of_several_blocks(device: str, path: object) -> None:
    """The most recent of the longest matches, in a block of its own."""
    texts = Texts(device, 1, 3 * kernels.BLOCK)
    text = [index % 3000 + 10 for index in range(2 * kernels.BLOCK + 900)]
    text[5:9], text[2500:2504], text[2503:2507] = [1, 2, 3, 501], [1, 2, 3, 502], [0, 2, 3, 503]
    texts.write(0, text)
    drafts = path.extend_and_match(texts.buffers, texts.rows({0: [1, 2, 3]}, set()), 1, 8, 2)
    assert drafts.tolist() == [[0, 2]]
    drafts = path.extend_and_match(texts.buffers, texts.rows({0: [9, 9, 2, 3]}, set()), 2, 8, 1)
    assert drafts.tolist() == [[9]], "the match of 2, 3 is the one that was appended before"


@PATHS
def test_a_full_buffer_drops_tokens(device: str, path: object) -> None:
    texts = Texts(device, 2, 8)
    texts.write(0, [1, 2, 3, 1, 2, 3])
    drafts = path.extend_and_match(texts.buffers, texts.rows({0: [1, 2, 3, 4]}, set()), 1, 3, 2)
    assert texts.buffers.tokens.tolist() == [[1, 2, 3, 1, 2, 3, 1, 2], [-9] * 8]
    assert texts.buffers.lengths.tolist() == [8, 0]
    assert drafts.tolist() == [[3, 1]]


@PATHS
def test_without_drafts_tokens_are_appended(device: str, path: object) -> None:
    texts = Texts(device, 1, 40)
    drafts = path.extend_and_match(texts.buffers, texts.rows({0: list(range(30))}, set()), 1, 3, 0)
    assert drafts.shape == (1, 0)
    assert texts.buffers.tokens[0, :30].tolist() == list(range(30))
