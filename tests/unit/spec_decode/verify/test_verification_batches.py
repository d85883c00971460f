"""Requests with different rules and numbers of drafts in one verification: each gets the same result as alone."""

import itertools

import pytest
import torch
from torch import Tensor

from outrider.spec_decode.verify.verification import Rule, VerifyRow, verify


def mixed_batch() -> tuple[Tensor, list[VerifyRow]]:
    generator = torch.Generator().manual_seed(11)
    rows: list[VerifyRow] = []
    parts: list[Tensor] = []
    kinds = itertools.product(Rule, (0, 1, 3, 5), (True, False))
    for number, (rule, k, dense) in enumerate(kinds):
        table = torch.randn(1 + k, 50, generator=generator) * 2
        q = (table[:k] + torch.randn(k, 50, generator=generator)).softmax(-1)
        drafts = table[:k].argmax(-1).tolist()
        probs = q if dense and rule is Rule.REJECTION and k else None
        rows.append(VerifyRow(number * 1000 - 5, 3 * number, drafts, probs, rule))
        parts.append(table)
    return torch.cat(parts), rows


def test_a_mixed_batch_is_its_rows() -> None:
    logits, rows = mixed_batch()
    together = verify(logits, rows)
    start = 0
    for row, result in zip(rows, together, strict=True):
        end = start + 1 + len(row.draft_ids)
        assert verify(logits[start:end], [row]) == [result]
        assert len(result.token_ids) == 1 + result.num_accepted
        assert result.token_ids[: result.num_accepted] == list(row.draft_ids)[: result.num_accepted]
        start = end
    assert any(0 < r.num_accepted < len(row.draft_ids) for r, row in zip(together, rows, strict=True))


def test_the_logits_are_not_changed() -> None:
    logits, rows = mixed_batch()
    kept = logits.clone()
    verify(logits, rows)
    assert torch.equal(logits, kept)


def test_greedy_rows_are_argmax() -> None:
    logits = torch.randn(4, 20)
    best = logits.argmax(-1).tolist()
    drafts = [best[0], best[1], (best[2] + 1) % 20]
    assert verify(logits, [VerifyRow(1, 0, drafts, None, Rule.GREEDY)]) == [(best[:3], 2)]


def test_no_rows() -> None:
    assert verify(torch.empty(0, 5), []) == []


def test_wrong_number_of_logits_is_refused() -> None:
    with pytest.raises(ValueError, match="3 positions"):
        verify(torch.zeros(2, 5), [VerifyRow(1, 0, [1, 2], None, Rule.GREEDY)])
