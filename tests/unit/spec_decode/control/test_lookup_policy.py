"""The policy with prompt lookup on texts of random and of copied tokens, in simulated time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from outrider.platform.core.batch import RowPlan, RowResult, StepPlan, StepResult
from outrider.platform.core.request import NO_DRAFTS, Request, Status
from outrider.platform.core.sampling_params import SamplingParams
from outrider.spec_decode.control.adapters import DrafterTraits
from outrider.spec_decode.control.policy import SpeculationPolicy
from outrider.spec_decode.drafters.base import DraftRow, TargetOutput
from outrider.spec_decode.drafters.ngram import NgramDrafter

GREEDY = SamplingParams(temperature=0.0)
MOST = 16


@dataclass
class Replay:
    """Requests one after the other, whose text is known; a draft costs `each` of a step."""

    each: float = 0.1
    now: float = 0.0
    verified: list[int] = field(default_factory=list)
    """Drafts that each step verified."""

    def __post_init__(self) -> None:
        self.policy = SpeculationPolicy([DrafterTraits("ngram", MOST, 0.5, is_free=True)], lambda: self.now)
        self.drafter = NgramDrafter(1, 4, by_match=True)
        for choice in [*self.policy.choices] * 2:
            self.policy.hold(*choice)
            self.answer([0], random_tokens(60))
        self.policy.release()

    def answer(self, prompt: list[int], text: list[int]) -> int:
        """Steps that it takes to generate `text`."""
        self.verified.clear()
        request = Request("r", [*prompt, text[0]], len(prompt), GREEDY, seed_key=1)
        request.status, whole = Status.RUNNING, [*prompt, *text]
        while len(request.tokens) < len(whole):
            start, drafts = len(request.tokens), request.drafts.token_ids
            row = RowPlan(request, start - 1, 1 + len(drafts), len(drafts), True, MOST)
            self.policy.choose([row])
            seconds = 0.02 * (1.0 + self.each * len(drafts))
            self.now += seconds
            right = next(
                (i for i, draft in enumerate(drafts) if start + i >= len(whole) or draft != whole[start + i]),
                len(drafts),
            )
            request.tokens += whole[start : start + right + 1]
            request.drafts = NO_DRAFTS
            length, wanted = len(request.tokens), row.max_new_drafts
            rated = self.policy.reads_confidence
            draft_row = DraftRow(request, request.tokens, length - 1, length, wanted, [], True, is_rated=rated)
            request.drafts = self.drafter.propose([draft_row], TargetOutput())[0].drafts
            self.policy.observe(StepPlan([row]), StepResult([RowResult([0], right)], seconds, 0.0))
            self.verified.append(len(drafts))
        request.status = Status.FINISHED
        return len(self.verified)


def random_tokens(count: int, seed: int = 0, vocabulary: int = 30) -> list[int]:
    """Tokens of a small vocabulary: the last one has nearly always occurred before, and says nothing."""
    generator = random.Random(seed)
    return [generator.randrange(vocabulary) for _ in range(count)]


def test_drafts_that_are_wrong_are_verified_now_and_then():
    """A lookup finds three drafts in nearly every step. Without results a fit that is too low would stay so."""
    replay = Replay(each=2.0)
    replay.answer([0], random_tokens(200, 1))
    assert replay.answer([0], random_tokens(200, 2)) > 190
    assert 2 <= sum(replay.verified) < 20


def test_a_passage_is_copied_at_once_after_text_without_right_drafts():
    """Recent acceptance says nothing of a passage that begins; the length of its match does."""
    replay = Replay()
    passage = random_tokens(60, 3, vocabulary=10**6)
    replay.answer([*passage, 0], random_tokens(200, 1))
    free = random_tokens(100, 2)
    alone = replay.answer([*passage, 0], free)
    assert replay.answer([*passage, 0], free + passage) - alone < 25


def test_a_new_request_starts_from_what_its_adapter_accepted():
    """Of a short answer after others of its kind, few drafts are verified from the first token on."""
    replay = Replay()
    replay.answer([0], random_tokens(40, 1))
    first = sum(replay.verified)
    for seed in range(2, 8):
        replay.answer([0], random_tokens(40, seed))
    replay.answer([0], random_tokens(40, 1))
    assert sum(replay.verified) < first / 2
