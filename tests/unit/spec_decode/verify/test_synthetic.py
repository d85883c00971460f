"""Synthetic acceptance: the rates are met for any drafts, and it is off by default."""

import logging

import pytest
import torch

from outrider.kernels.verification import NO_TOKEN
from outrider.platform.core.request import Drafts, Request
from outrider.platform.core.sampling_params import SamplingParams
from outrider.platform.engine.sampling.sampler import Sampler, SampleRow
from outrider.spec_decode.verify.synthetic import accept_at_rates, choose_synthetic
from outrider.spec_decode.verify.verification import Rule, Verified, VerifyRow, as_verified, verify

RATES = (0.8, 0.5, 0.5, 0.1)
ROUNDS = 20_000


def row(number: int, drafts: list[int], rule: Rule = Rule.GREEDY) -> VerifyRow:
    return VerifyRow(7919 * number + 1, 10 + number % 3, drafts, None, rule)


def verify_synthetic(logits: torch.Tensor, rows: list[VerifyRow]) -> list[Verified]:
    tokens, accepted = choose_synthetic(logits, rows, RATES)
    starts = torch.tensor([0, *(1 + len(row.draft_ids) for row in rows)]).cumsum(0)
    for start, end, count in zip(starts, starts[1:], accepted, strict=False):
        assert (tokens[start + count + 1 : end] == NO_TOKEN).all()
    return as_verified(rows, tokens.tolist(), accepted.tolist())


@pytest.mark.slow
def test_each_position_is_accepted_at_its_rate() -> None:
    accepted = torch.tensor([accept_at_rates(row(i, [1, 2, 3, 4]), RATES) for i in range(ROUNDS)])
    for position, rate in enumerate(RATES):
        share = (accepted > position).float().mean().item()
        assert abs(share - rate) < 5 * (rate * (1 - rate) / ROUNDS) ** 0.5
    assert not (accepted == 2).any()  # equal rates: a draft accepted at position 1 is followed by one at position 2


@pytest.mark.slow
def test_successive_rounds_of_one_request_are_independent() -> None:
    """The next step starts after the last one; its first coin must not depend on the last one's."""
    position, counts = 0, []
    for _ in range(5000):
        accepted = accept_at_rates(VerifyRow(99, position, [1, 2, 3, 4], None, Rule.GREEDY), RATES)
        counts.append(float(accepted))
        position += accepted + 1
    series = torch.tensor(counts)
    assert abs(series.mean().item() - sum(RATES)) < 0.1
    correlation = torch.corrcoef(torch.stack((series[:-1], series[1:])))[0, 1].item()
    assert abs(correlation) < 0.07  # five standard deviations


@pytest.mark.parametrize(("rates", "accepted"), [((1.0, 1.0), 2), ((1.0, 0.0), 1), ((0.0, 0.0), 0)])
def test_rates_of_zero_and_one_are_exact(rates: tuple[float, ...], accepted: int) -> None:
    assert {accept_at_rates(row(i, [5, 6]), rates) for i in range(500)} == {accepted}


@pytest.mark.parametrize("rule", list(Rule))
def test_the_accepted_tokens_are_the_drafts_and_the_next_is_the_targets(rule: Rule) -> None:
    logits = torch.full((5, 30), -40.0)
    best = [20, 21, 22, 23, 24]  # the target's token, almost certain; no draft equals it
    logits[torch.arange(5), torch.tensor(best)] = 40.0
    seen = set()
    for number in range(200):
        (got,) = verify_synthetic(logits, [row(number, [1, 2, 3, 4], rule)])
        assert got.token_ids == [*[1, 2, 3, 4][: got.num_accepted], best[got.num_accepted]]
        seen.add(got.num_accepted)
    assert seen == {0, 1, 3, 4}


def test_ragged_rows_and_a_batch_change_nothing() -> None:
    torch.manual_seed(3)
    rows = [row(i, list(range(i % 5)), rule) for i, rule in enumerate(list(Rule) * 6)]
    logits = torch.randn(sum(1 + len(r.draft_ids) for r in rows), 40)
    together, start = verify_synthetic(logits, rows), 0
    for one, got in zip(rows, together, strict=True):
        end = start + 1 + len(one.draft_ids)
        assert verify_synthetic(logits[start:end], [one]) == [got]
        if not one.draft_ids and one.rule is not Rule.REJECTION:
            assert verify(logits[start:end], [one]) == [got]
        start = end


def test_misfits_are_refused() -> None:
    with pytest.raises(ValueError, match="5 drafts for 4"):
        verify_synthetic(torch.zeros(6, 9), [row(1, [1, 2, 3, 4, 5])])
    with pytest.raises(ValueError, match=r"logits must be float32 \[3, V\]"):
        verify_synthetic(torch.zeros(2, 9), [row(1, [1, 2])])


def test_synthetic_acceptance_is_opt_in_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    logits = torch.zeros(3, 50)
    logits[:, 7] = 9.0
    request = Request("r", [1, 2], 2, SamplingParams(temperature=0), seed_key=4)
    rows = [SampleRow(request, Drafts([3, 3]))]
    with caplog.at_level(logging.WARNING):
        plain = Sampler()(logits.clone(), rows)
        assert not caplog.records
        synthetic = Sampler(synthetic_rates=(1.0, 1.0))(logits.clone(), rows)
    assert plain[0].token_ids == [7]
    assert synthetic[0].token_ids == [3, 3, 7]
    assert "meaningless" in caplog.text
