"""Prompt lookup compared with a plain search, and the drafter's state of a request."""

import random

import numpy as np
import pytest

from outrider.platform.core.request import Request, Status
from outrider.platform.core.sampling_params import SamplingParams
from outrider.spec_decode.drafters.base import DraftRow, TargetOutput
from outrider.spec_decode.drafters.ngram import NgramDrafter, lookup


def reference(tokens: list[int], min_n: int, max_n: int) -> int:
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                return end
    return -1


def make_request(name: str = "r") -> Request:
    return Request(name, [1], 1, SamplingParams(), seed_key=1)


def row(request: Request, tokens: list[int], max_drafts: int = 3, sampled: bool = True) -> DraftRow:
    return DraftRow(request, tokens, len(tokens) - 1, len(tokens) - 1, max_drafts, [], sampled)


def drafts(drafter: NgramDrafter, request: Request, tokens: list[int], max_drafts: int = 3) -> list[int]:
    return drafter.propose([row(request, tokens, max_drafts)], TargetOutput())[0].drafts.token_ids


@pytest.mark.parametrize("vocab", [2, 4, 30])
@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (1, 5), (2, 3), (4, 4)])
def test_lookup_is_the_reference(vocab: int, min_n: int, max_n: int) -> None:
    for length in range(1, 60):
        tokens = [random.randrange(vocab) for _ in range(length)]
        assert lookup(np.array(tokens, dtype=np.int32), min_n, max_n) == reference(tokens, min_n, max_n)


@pytest.mark.parametrize(
    ("tokens", "min_n", "max_n", "expected"),
    [
        ([], 1, 3, -1),
        ([7], 1, 3, -1),
        ([7, 7], 1, 3, 1),
        ([1, 2, 3, 9, 1, 2, 3], 1, 3, 3),
        ([1, 2, 5, 1, 2, 6, 1, 2], 1, 3, 5),  # the most recent
        ([3, 1, 2, 5, 4, 1, 2, 6, 3, 1, 2], 1, 3, 3),  # the longest comes first
        ([1, 2, 3, 4, 3], 2, 3, -1),  # shorter than the shortest
    ],
)
def test_lookup(tokens: list[int], min_n: int, max_n: int, expected: int) -> None:
    assert lookup(np.array(tokens, dtype=np.int32), min_n, max_n) == expected


def test_drafts_are_the_tokens_that_followed() -> None:
    drafter, request = NgramDrafter(1, 3), make_request()
    assert drafts(drafter, request, [1, 2, 3, 4, 5, 6, 1, 2, 3]) == [4, 5, 6]
    assert drafter.propose([row(request, [1, 2, 3, 4, 5, 6, 1, 2, 3])], TargetOutput())[0].drafts.probs is None


def test_a_repeating_text_is_continued() -> None:
    drafter, request = NgramDrafter(1, 3), make_request()
    assert drafts(drafter, request, [9, 1, 2, 1, 2, 1, 2], max_drafts=5) == [1, 2, 1, 2, 1]
    assert drafts(drafter, make_request("s"), [4, 4], max_drafts=3) == [4, 4, 4]


@pytest.mark.parametrize(
    ("repeated", "expected"),
    [([3], [9, 7, 7]), ([2, 3], [9, 7, 7]), ([1, 2, 3], [9, 7, 7, 7, 6]), ([8, 1, 2, 3], [9, 7, 7, 7, 6])],
)
def test_a_longer_match_has_more_drafts(repeated: list[int], expected: list[int]) -> None:
    """Up to the requested number, and beyond the longest match that is searched."""
    drafter = NgramDrafter(1, 3, by_match=True)
    tokens = [8, 1, 2, 3, 9, 7, 7, 7, 6, 6, *repeated]
    assert drafts(drafter, make_request(), tokens, max_drafts=5) == expected


@pytest.mark.parametrize("vocab", [2, 3, 40])
@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (1, 5), (2, 3), (4, 4), (1, 12)])
def test_remembered_positions_equal_a_search(vocab: int, min_n: int, max_n: int) -> None:
    """With few positions and with so many that the array is searched."""
    drafter, request, tokens = NgramDrafter(min_n, max_n), make_request(), []
    for length in range(1, 160):
        tokens = [*tokens, random.randrange(vocab)]
        if length % 3:
            start = reference(tokens, min_n, max_n)
            assert drafts(drafter, request, tokens, max_drafts=1) == ([] if start < 0 else [tokens[start]])


def test_a_growing_sequence_is_looked_up_whole() -> None:
    drafter, request = NgramDrafter(1, 4), make_request()
    tokens = [random.randrange(5) for _ in range(200)]
    while len(tokens) < 900:
        start = reference(tokens, 1, 4)
        expected = [] if start < 0 else (tokens[start:] * 5)[:5]
        assert drafts(drafter, request, tokens, max_drafts=5)[: len(expected)] == expected
        tokens = tokens + [random.randrange(5) for _ in range(random.randrange(1, 40))]


def test_no_drafts_when_none_are_asked_for_and_a_row_catches_up() -> None:
    drafter, request = NgramDrafter(1, 3), make_request()
    assert drafts(drafter, request, [1, 2, 1], max_drafts=0) == []
    assert drafter.propose([row(request, [1, 2, 1], 3, sampled=False)], TargetOutput())[0].drafts.token_ids == []
    assert drafts(drafter, request, [1, 2, 1, 3, 1, 2], max_drafts=1) == [1]


def test_requests_do_not_see_each_other() -> None:
    drafter, first, second = NgramDrafter(1, 3), make_request("a"), make_request("b")
    assert drafts(drafter, first, [1, 2, 3, 4, 1, 2]) == [3, 4, 1]
    assert drafts(drafter, second, [8, 9, 1, 2]) == []
    both = drafter.propose([row(second, [8, 9, 1, 2, 8, 9]), row(first, [1, 2, 3, 4, 1, 2, 3])], TargetOutput())
    assert [p.drafts.token_ids for p in both] == [[1, 2, 8], [4, 1, 2]]


def test_a_name_used_again_is_a_new_request() -> None:
    drafter = NgramDrafter(1, 3)
    drafts(drafter, make_request("a"), [1, 2, 3, 4, 1, 2])
    assert drafts(drafter, make_request("a"), [5, 6, 7, 1, 2, 9, 9, 2, 1, 2]) == [9, 9, 2]


def test_finished_requests_are_forgotten() -> None:
    drafter, requests = NgramDrafter(1, 3), [make_request(str(i)) for i in range(5)]
    for request in requests:
        drafts(drafter, request, [1, 1])
    for request in requests[:4]:
        request.status = Status.FINISHED
    drafter.propose([], TargetOutput())
    assert list(drafter._histories) == ["4"]


def test_everything_counts_as_computed() -> None:
    proposal = NgramDrafter(1, 3).propose([row(make_request(), [1, 1, 1])], TargetOutput())[0]
    assert proposal.num_draft_computed == 3
