"""Rows of a pass: which states are those of their last tokens."""

import pytest
import torch

from outrider.models.batch import SequenceRows


def make_rows(counts: list[int]) -> SequenceRows:
    return SequenceRows([0] * sum(counts), counts, [0] * len(counts), [[0]] * len(counts))


@pytest.mark.parametrize("counts", [[1], [4], [1, 1, 1], [3, 1, 2], [1, 5]])
def test_states_of_last_tokens(counts: list[int]) -> None:
    rows, num_tokens = make_rows(counts), sum(counts)
    states = torch.arange(2.0 * num_tokens).view(num_tokens, 2)
    ends = torch.tensor(counts).cumsum(0) - 1
    assert torch.equal(rows.last_tokens(states.device), ends)
    first, second = rows.last_of(states, -states)
    assert torch.equal(first, states[ends])
    assert torch.equal(second, -states[ends])


@pytest.mark.parametrize(("counts", "unused"), [([4], [2]), ([1, 1], [0, 0]), ([3, 2], [0, 1])])
def test_tokens_that_count_for_nothing_are_not_the_last(counts: list[int], unused: list[int]) -> None:
    rows, num_tokens = make_rows(counts), sum(counts)
    rows.unused = torch.tensor(unused)
    states = torch.arange(2.0 * num_tokens).view(num_tokens, 2)
    ends = torch.tensor(counts).cumsum(0) - 1 - rows.unused
    (got,) = rows.last_of(states)
    assert torch.equal(got, states[ends])
