"""Steps that overlap while the number of drafts of each row changes every step."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.platform.core.batch import RowPlan
from outrider.platform.engine.queue.row_choices import can_overlap_next

from .test_pipeline import expected, finish, make, pipe, request
from .test_pipeline_drafts import CASES, LATE, Drafting, check_texts, follow, largest, running


class Chooser:
    """Gives each row some number of drafts, sometimes by a drafter on the host."""

    plans_no_drafts = False

    def __init__(self, seed, waits, counts):
        """`waits`: share of the steps after which the host drafts; `counts`: numbers of drafts to choose from."""
        self.random, self.waits, self.counts = random.Random(seed), waits, counts
        self.asked = []

    def choose(self, rows, *, requests_wait):
        self.asked.append(list(rows))
        drafter = int(self.random.random() < self.waits)
        for row in rows:
            row.drafter = drafter
            if not drafter:
                row.max_new_drafts = min(row.max_new_drafts, self.random.choice(self.counts))


@pytest.mark.slow
@settings(max_examples=120)
@given(
    *CASES,
    st.tuples(
        st.integers(0, 99), st.sampled_from([0.0, 0.2]), st.sampled_from([[0], [0, 0, 3], [0, 1, 4], [1, 2, 3, 4]])
    ),
)
def test_every_sequence_gets_its_own_text(jobs, engine, drafter, limits, aborts, choices):
    check_texts(jobs, engine, drafter, limits, aborts, Chooser(*choices))


@pytest.mark.parametrize("counts", [[0], [3], [1, 2, 3]])
def test_steps_overlap_whatever_number_of_drafts_is_chosen(counts):
    """All but those of the prompt, if drafts are wanted: with none, as in an engine without a drafter."""
    chooser = Chooser(1, 0.0, counts)
    scheduler = make(80, LATE, chooser=chooser, max_num_batched_tokens=32)
    device = Drafting(2)
    scheduler.add(request("a", [1, 2, 3], 30))
    assert finish(scheduler, pipe(scheduler, device)) == {"a": expected([1, 2, 3], 30)}
    kinds = [kind for kind, _ in device.events]
    begins = ["launch"] if counts == [0] else ["launch", "collect", "launch"]
    assert kinds[: len(begins) + 6] == [*begins, *["launch", "collect"] * 3]
    assert sum(pair == ("launch", "launch") for pair in pairwise(kinds)) == 1, "from then on one is always in flight"
    assert len(chooser.asked) == device.num_launched, "once for each step"
    assert (device.num_device_drafts > 0) is (counts != [0])


def chosen(rows, counts, limits=LATE, drafter=0):
    """True if a step with these numbers of drafts can overlap the next."""
    for row, count in zip(rows, counts, strict=True):
        row.max_new_drafts, row.drafter = count, drafter
    return can_overlap_next(rows, limits)


def test_a_row_may_get_no_drafts_while_others_do():
    rows = [largest(running()), largest(running())]
    assert [row.max_new_drafts for row in rows] == [3, 3]
    assert chosen(rows, [0, 2])


def test_a_lagging_drafter_catches_up_on_the_host():
    lagging = running(num_draft_computed=4)
    assert chosen([largest(lagging)], [0])
    assert not chosen([largest(lagging)], [1])
    item = running()
    follow(item, 2, 0)
    assert chosen([largest(item)], [0])
    assert not chosen([largest(item)], [1])
    assert chosen([largest(item)], [1], LATE._replace(extra_slots=False))


def test_prompts_overlap_only_with_rows_without_drafts():
    prompt = RowPlan(running(), 0, 4, 0, samples=False, max_new_drafts=0)
    assert chosen([largest(running()), prompt], [0, 0])
    assert not chosen([largest(running()), prompt], [1, 0])


def test_logits_edits_that_read_sampled_tokens_wait_even_without_drafts():
    reading = running(params={"bad_words_token_ids": [[1, 2]]})
    assert not chosen([largest(reading)], [0])
    young = running(params={"min_tokens": 9})
    assert chosen([largest(young)], [0]), "one token comes"
    young.drafts = running().drafts._replace(token_ids=[1, 2])
    assert largest(young).num_drafts == 2
    assert not chosen([largest(young)], [0]), "the logits after them depend on their number"


def test_steps_wait_for_drafts_of_the_host():
    assert not chosen([largest(running())], [2], drafter=1)
    assert not chosen([largest(running())], [2], LATE._replace(max_drafts_on_device=0)), "the drafter is on the host"
    assert chosen([largest(running())], [0], LATE._replace(max_drafts_on_device=0))


def test_drafts_of_the_host_come_between_steps():
    chooser = Chooser(1, 1.0, [3])
    scheduler = make(80, LATE, chooser=chooser, max_num_batched_tokens=32)
    device = Drafting(2)
    scheduler.add(request("a", [1, 2, 3], 20))
    assert finish(scheduler, pipe(scheduler, device)) == {"a": expected([1, 2, 3], 20)}
    assert [kind for kind, _ in device.events[:4]] == ["launch", "collect", "launch", "collect"]
    assert device.num_device_drafts == 0
