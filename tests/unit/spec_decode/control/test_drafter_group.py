"""Several drafters behind the contract of one, built from a configuration."""

from types import SimpleNamespace

import pytest

from outrider.models.batch import KVLayerSpec
from outrider.platform.core.request import Drafts, Request
from outrider.platform.core.sampling_params import SamplingParams
from outrider.platform.core.speculative_config import parse_speculative
from outrider.spec_decode.control.drafter_group import DrafterGroup
from outrider.spec_decode.control.factory import make_speculation
from outrider.spec_decode.drafters.base import Drafter, DrafterNeeds, DraftRow, Proposal, TargetOutput

WITHOUT_TARGET = SimpleNamespace(model_path=None, device="cpu")
"""Context of drafters that need no target."""


class Noting(Drafter):
    """Drafts its number, and records its calls."""

    def __init__(self, number):
        self.number, self.calls = number, []

    def propose(self, rows, target):
        self.calls.append(("propose", [row.max_drafts for row in rows]))
        return [Proposal(Drafts([self.number] * row.max_drafts), len(row.tokens)) for row in rows]

    def watch(self, rows, target):
        self.calls.append(("watch", len(rows)))

    def forget_adapter(self, digest):
        self.calls.append(("forget", digest))


def row(drafter, count):
    request = Request("r", [1, 2, 3], 3, SamplingParams(), seed_key=0)
    return DraftRow(request, request.tokens, 3, 3, count, [], sampled=True, drafter=drafter)


@pytest.fixture
def drafters():
    return [Noting(0), Noting(1)]


def test_each_drafter_drafts_for_its_rows(drafters):
    found = DrafterGroup(drafters).propose([row(0, 2), row(1, 3), row(0, 0)], TargetOutput())
    assert [list(proposal.drafts.token_ids) for proposal in found] == [[0, 0], [1, 1, 1], []]
    assert drafters[0].calls == [("propose", [2, 0, 0])], "the first sees all rows, to keep up"
    assert drafters[1].calls == [("propose", [3])]


@pytest.mark.parametrize("asked", [0, 1])
def test_a_drafter_without_rows_only_watches(drafters, asked):
    found = DrafterGroup(drafters).propose([row(asked, 1), row(asked, 2)], TargetOutput())
    assert [len(proposal.drafts.token_ids) for proposal in found] == [1, 2]
    assert drafters[1 - asked].calls == [("watch", 2)]


def test_all_watch_and_all_forget(drafters):
    group = DrafterGroup(drafters)
    group.watch([row(0, 0)], TargetOutput())
    group.forget_adapter(b"a")
    assert drafters[0].calls == drafters[1].calls == [("watch", 1), ("forget", b"a")]


def speculation(**config):
    return make_speculation(parse_speculative({"method": "ngram", **config}), WITHOUT_TARGET)


def test_a_fixed_number_has_no_policy():
    assert make_speculation(None, WITHOUT_TARGET).policy is None
    assert speculation(num_speculative_tokens=3).policy is None


def test_adaptive_prompt_lookup_may_make_sixteen_drafts():
    """The policy gets them, and chooses as many as are useful."""
    assert (0, 16) in speculation().policy.choices
    assert max(speculation(adaptive=True, num_speculative_tokens=5).policy.choices) == (0, 5)


def test_preferred_matches_are_verified_instead_of_the_first_drafters(drafters):
    rows = [row(0, 2), row(0, 3), row(1, 2)]
    group = DrafterGroup(drafters, lambda request, drafts, planned: request is rows[1].request and planned == 3)
    found = group.propose(rows, TargetOutput())
    assert [list(proposal.drafts.token_ids) for proposal in found] == [[0, 0], [1, 1, 1], [1, 1]]
    assert [proposal.drafts.drafter for proposal in found] == [0, 1, 1]
    assert drafters[0].calls == [("propose", [2, 0, 0])], "it makes no drafts that are not used"


def test_the_first_drafter_only_watches_if_all_rows_have_matches(drafters):
    found = DrafterGroup(drafters, lambda *_: True).propose([row(0, 2), row(0, 1)], TargetOutput())
    assert [len(proposal.drafts.token_ids) for proposal in found] == [2, 1]
    assert drafters[0].calls == [("watch", 2)]


@pytest.mark.parametrize("others", [[], [row(0, 2)]])
def test_the_first_drafter_lags_after_a_match_as_it_says(others):
    """It catches up with the tokens for which it was not called, and with no others."""

    class Lagging(Noting):
        needs = DrafterNeeds(kv_layers=(KVLayerSpec(1, 8),))

        def propose(self, rows, target):
            return [proposal._replace(num_draft_computed=2) for proposal in super().propose(rows, target)]

    matched = row(0, 2)._replace(num_draft_valid=1)
    group = DrafterGroup([Lagging(0), Noting(1)], lambda request, *_: request is matched.request)
    found = group.propose([matched, *others], TargetOutput())
    assert found[0].drafts.drafter == 1
    assert found[0].num_draft_computed == (2 if others else 1)
