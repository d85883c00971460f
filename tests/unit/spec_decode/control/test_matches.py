"""Matches of prompt lookup instead of neural drafts: by what followed matches of each length, used or not."""

import pytest

from outrider.platform.core.batch import RowPlan, RowResult, StepPlan, StepResult
from outrider.platform.core.request import Drafts, Request, Status
from outrider.platform.core.sampling_params import SamplingParams
from outrider.spec_decode.control.adapters import FEW_ROUNDS, AdapterState, DrafterTraits, RowState
from outrider.spec_decode.control.policy import SpeculationPolicy
from outrider.spec_decode.drafters.base import DraftRow, TargetOutput
from outrider.spec_decode.drafters.ngram import NgramDrafter

NUM_NEURAL = 4


class Text:
    """One request, whose text continues matches as they say, or not."""

    def __init__(self, digest: bytes = b"") -> None:
        self.policy = SpeculationPolicy([DrafterTraits("head", 4, 0.5), DrafterTraits("ngram", 16, 0.5)], lambda: 0.0)
        self.begin(digest)

    def begin(self, digest: bytes) -> None:
        self.request = Request("r", [0] * 8, 8, SamplingParams(), seed_key=1)
        self.request.text_namespace, self.request.status = (b"", digest), Status.RUNNING
        self.policy.choose([RowPlan(self.request, 7, 1, 0, True, NUM_NEURAL)])

    def step(self, length: int, is_right: bool) -> bool:
        """Decide about four drafts after a match of `length` tokens; then the text follows. Returns the decision."""
        decided = self.policy.prefers_match(self.request, Drafts([5, 6, 7, 8], match_length=length), NUM_NEURAL)
        self.request.tokens += [5, 6, 7, 8, 9] if is_right else [1]
        return decided


def test_a_long_match_is_preferred_and_a_short_one_is_not() -> None:
    text = Text()
    assert text.step(9, is_right=True)
    assert not text.step(1, is_right=True)
    assert not text.policy.prefers_match(text.request, Drafts([]), NUM_NEURAL)


@pytest.mark.parametrize("length", [1, 3, 9])
def test_what_follows_decides_for_each_length(length: int) -> None:
    """Also of drafts that were not verified, so a length recovers."""
    text, other = Text(), 5
    before = text.step(other, is_right=True)
    for _ in range(30):
        text.step(length, is_right=False)
    assert not text.step(length, is_right=False)
    for _ in range(60):
        text.step(length, is_right=True)
    assert text.step(length, is_right=True)
    assert text.step(other, is_right=True) is before


def test_other_adapters_have_their_own_rates() -> None:
    text = Text()
    for _ in range(40):
        text.step(9, is_right=False)
    assert not text.step(9, is_right=False)
    text.begin(b"another")
    assert text.step(9, is_right=True)


@pytest.mark.parametrize("finds", [False, True])
def test_look_ups_tell_what_prompt_lookup_alone_would_accept(finds: bool) -> None:
    """Without a trial; drafts that were not requested, or that the text has not reached, count neither way."""
    adapter = AdapterState([0.7, 0.5], 0.0)
    row, tokens = RowState(adapter, 2), [0] * 8
    for _ in range(2 * FEW_ROUNDS):
        row.prefers(Drafts([5, 6, 7], match_length=9) if finds else Drafts([]), tokens, 3)
        tokens += [5]
    counts, before = adapter.counts[1], [*adapter.rates(1)]
    assert (before[0] > 0.9) if finds else (before[0] < 0.1)
    assert (counts.made_shares([1.0] * 6)[0] > 0.9) is finds
    assert counts.tried[1] == 0.0, "the text was one token ahead"


def test_matches_count_for_the_drafter_that_was_planned() -> None:
    """Else it seems as good as on the text alone that matches leave to it."""
    text = Text()
    row = RowPlan(text.request, 7, 1, 0, True, NUM_NEURAL)
    for _ in range(20):
        text.policy.choose([row])
        row.max_new_drafts = NUM_NEURAL
        made = Drafts([5, 6, 7, 8], match_length=9)
        assert text.policy.prefers_match(text.request, made, NUM_NEURAL)
        text.request.drafts = made._replace(drafter=1)
        accepted = row.num_drafts
        text.policy.observe(StepPlan([row]), StepResult([RowResult([5] * (1 + accepted), accepted)], 0.0))
        text.request.tokens += [5, 6, 7, 8, 9]
        row = RowPlan(text.request, len(text.request.tokens) - 1, 5, 4, True, NUM_NEURAL)
    [entry] = text.policy.snapshot().values()
    assert entry["drafter"] == "head"
    assert entry["acceptance"][0] > 0.9


def test_nothing_is_looked_up_while_costs_are_measured() -> None:
    text = Text()
    assert text.policy.looks_up(text.request)
    text.policy.hold(0, 4)
    assert not text.policy.looks_up(text.request)


@pytest.mark.parametrize(("seconds", "share"), [(0.002, 1 / 4), (0.02, 1.0)])
def test_short_steps_look_up_now_and_then_until_a_match_is_used(seconds: float, share: float) -> None:
    text, looked_up = Text(), []
    for _ in range(16 * FEW_ROUNDS):
        row = RowPlan(text.request, len(text.request.tokens) - 1, 2, 1, True, 1)
        text.policy.choose([row])
        looked_up.append(text.policy.looks_up(text.request))
        if looked_up[-1]:
            text.policy.prefers_match(text.request, Drafts([]), 1)
        text.request.tokens += [1, 2]
        text.request.drafts = Drafts([3])
        text.policy.observe(StepPlan([row]), StepResult([RowResult([1, 2], 1)], seconds, 1e-4))
    last = looked_up[-100:]
    assert sum(last) == share * len(last)
    assert text.policy.prefers_match(text.request, Drafts([5] * 9, match_length=9), 1)
    assert all(text.policy.looks_up(text.request) for _ in range(3))


def test_prompt_lookup_reports_how_many_tokens_matched() -> None:
    request = Request("r", [1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 4, 5, 6, 7], 15, SamplingParams(), seed_key=1)
    request.status = Status.RUNNING
    row = DraftRow(request, request.tokens, 14, 15, 3, (), sampled=True)
    [proposal] = NgramDrafter(2, 5, by_match=True).propose([row], TargetOutput())
    assert list(proposal.drafts.token_ids) == [9, 1, 2]
    assert proposal.drafts.match_length == 7
