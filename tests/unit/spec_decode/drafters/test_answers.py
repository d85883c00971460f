"""Answers that draft for each other: the table compared with plain counts, groups, bounds and isolation."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest

from outrider.platform.core.request import Request, Status
from outrider.platform.core.sampling_params import SamplingParams
from outrider.platform.core.speculative_config import parse_speculative
from outrider.spec_decode.drafters.answers import (
    BACK_OFF,
    CONTEXTS,
    IDLE_STEPS,
    LEAST_SURVIVAL,
    STEP_TOKENS,
    AnswerGroups,
    AnswerTable,
    make_groups,
)
from outrider.spec_decode.drafters.base import DraftRow, TargetOutput
from outrider.spec_decode.drafters.ngram import NgramDrafter

A, B = (b"tenant-a", b"adapter"), (b"tenant-b", b"adapter")
PROMPT = [3, 4]
TEXT = [31, 57, 12, 88, 45, 93, 20, 76, 64, 39]


def make_request(name="r", group="g", namespace=A, prompt=PROMPT, **params) -> Request:
    params = SamplingParams(**params)
    return Request(name, [*prompt], len(prompt), params, seed_key=1, group=group, text_namespace=namespace)


def row(request: Request, max_drafts: int = 6, *, is_rated: bool = False) -> DraftRow:
    tokens = request.tokens
    return DraftRow(request, tokens, len(tokens) - 1, len(tokens) - 1, max_drafts, [], True, is_rated=is_rated)


def propose(drafter: NgramDrafter, *requests: Request, max_drafts: int = 6) -> list[list[int]]:
    proposals = drafter.propose([row(request, max_drafts) for request in requests], TargetOutput())
    assert all(p.drafts.probs is None for p in proposals)
    return [list(p.drafts.token_ids) for p in proposals]


def make_drafter(scope="request", max_tokens=10_000) -> NgramDrafter:
    return NgramDrafter(1, 5, groups=AnswerGroups(scope, max_tokens))


def write(drafter: NgramDrafter, request: Request, tokens: list[int]) -> None:
    for token in tokens:
        request.tokens.append(token)
        propose(drafter, request)


def finish(drafter: NgramDrafter, *requests: Request) -> None:
    for request in requests:
        request.status = Status.FINISHED
    propose(drafter)


# -------------------------------------------------------------------- the table


def reference(texts: list[list[int]], context: list[int]) -> dict[int, float]:
    """Chance of each of the most frequent next tokens after the longest known context, by the formula of the module;
    every position is counted."""
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for text in texts:
        for length in CONTEXTS:
            for at in range(length, len(text)):
                counts[tuple(text[at - length : at])][text[at]] += 1
    known = [c for length in CONTEXTS if length <= len(context) and (c := counts.get(tuple(context[-length:])))]
    tokens = {token for token, count in known[-1].items() if count == max(known[-1].values())} if known else {}
    chances = dict.fromkeys(tokens, 0.0)
    for token in tokens:
        for c in known:
            chances[token] = (c[token] + BACK_OFF * chances[token]) / (c.total() + BACK_OFF)
    return chances


@pytest.mark.parametrize("vocab", [2, 4, 30])
def test_the_next_token_is_the_likeliest_of_plain_counts(vocab):
    rng, num_compared = random.Random(vocab), 0
    for _ in range(30):
        texts = [[rng.randrange(vocab) for _ in range(rng.randint(2, 40))] for _ in range(rng.randint(1, 5))]
        table = AnswerTable()
        for text in texts:
            table.add(text, 1, len(text))
        assert table.num_tokens == sum(len(text) - 1 for text in texts)
        for _ in range(10):
            context = [rng.randrange(vocab) for _ in range(rng.randint(1, 12))]
            wanted = reference(texts, context)
            found, chances = table.continuation(context, 1)
            if found:
                assert chances[0] == pytest.approx(wanted[found[0]])
                num_compared += 1
            else:
                assert min(wanted.values(), default=0.0) < LEAST_SURVIVAL
    assert num_compared > 100


def test_more_answers_that_agree_make_a_draft_likelier_and_more_drafts():
    table, chances = AnswerTable(), []
    for _ in range(4):
        table.add([*PROMPT, *TEXT], 2, 12)
        found, own = table.continuation(PROMPT, 4)
        assert found == TEXT[: len(found)]
        chances.append(own[0])
    assert chances == sorted(chances)
    assert len({*chances}) == 4
    assert len(found) == 4
    table.add([*PROMPT, 99], 2, 3)
    assert table.continuation(PROMPT, 1)[1][0] < chances[-1]


def test_the_majority_is_drafted_and_the_last_one_of_a_tie():
    table = AnswerTable()
    for end in (70, 80, 70):
        table.add([1, 2, end], 2, 3)
    assert table.continuation([1, 2], 1)[0] == [70]
    table.add([1, 2, 80], 2, 3)
    assert table.continuation([1, 2], 1)[0] == [80]


def test_drafts_end_where_answers_disagree():
    table = AnswerTable()
    for end in range(40, 60):
        table.add([1, 2, 9, end, end + 100], 2, 5)
    assert table.continuation([1, 2], 5)[0] == [9]


# --------------------------------------------------------------------- groups


def test_running_answers_of_a_request_draft_for_each_other():
    drafter, ahead, behind = make_drafter(), make_request("r#0"), make_request("r#1")
    propose(drafter, ahead, behind)
    write(drafter, ahead, TEXT[:6])
    assert propose(drafter, behind)[0] == TEXT[: len(propose(drafter, behind)[0])] != []
    behind.tokens += TEXT[:3]
    assert propose(drafter, behind, max_drafts=2) == [TEXT[3:5]]
    assert propose(drafter, behind, max_drafts=0) == [[]]


def test_rows_of_one_step_see_each_others_last_tokens():
    drafter, one, other = make_drafter(), make_request("r#0"), make_request("r#1")
    one.tokens += TEXT[:4]
    other.tokens += TEXT[:2]
    for order in ((one, other), (other, one)):
        assert propose(drafter, *order, max_drafts=2)[order.index(other)] == TEXT[2:4]


def test_a_finished_answer_still_drafts_for_its_siblings():
    drafter, first, second = make_drafter(), make_request("r#0"), make_request("r#1")
    propose(drafter, first, second)
    first.tokens += TEXT  # its last tokens are seen after its end
    finish(drafter, first)
    second.tokens += TEXT[:8]
    assert propose(drafter, second) == [TEXT[8:]]


@pytest.mark.parametrize("other", [{"group": None}, {"group": "h"}, {"namespace": B}, {"namespace": (A[0], b"new")}])
def test_nothing_reaches_another_group(other):
    drafter, mine = make_drafter(), make_request("r#0")
    write(drafter, mine, TEXT)
    theirs = make_request("other", **other)
    theirs.tokens += TEXT[:5]
    assert propose(drafter, theirs) == [[]]
    sibling = make_request("r#1")
    sibling.tokens += TEXT[:5]
    assert propose(drafter, sibling) == [TEXT[5:]]


def test_requests_with_the_same_prompt_share_if_that_is_asked_for():
    drafter = make_drafter("prompt")
    write(drafter, make_request("a", None), TEXT)
    for name, fields, shared in (
        ("b", {}, True),
        ("c", {"group": "siblings"}, True),
        ("d", {"prompt": [3, 5]}, False),
        ("e", {"namespace": B}, False),
        ("f", {"namespace": (A[0], b"new")}, False),
    ):
        request = make_request(name, **({"group": None} | fields))
        request.tokens += TEXT[:5]
        assert propose(drafter, request) == [TEXT[5:] if shared else []], name


def test_a_prompt_is_remembered_and_a_request_is_not():
    for scope, kept in (("prompt", True), ("request", False)):
        drafter, first = make_drafter(scope), make_request("a")
        write(drafter, first, TEXT)
        finish(drafter, first)
        for _ in range(IDLE_STEPS + 1):
            propose(drafter)
        later = make_request("b")
        later.tokens += TEXT[:5]
        assert propose(drafter, later) == [TEXT[5:] if kept else []]


def test_siblings_that_start_after_all_others_have_ended_are_drafted_for():
    drafter, first = make_drafter(), make_request("r#0")
    write(drafter, first, TEXT)
    finish(drafter, first)
    late = make_request("r#1")
    late.tokens += TEXT[:5]
    assert propose(drafter, late) == [TEXT[5:]]


def test_tokens_are_bounded_over_all_groups_and_the_least_recently_used_goes_first():
    drafter = make_drafter("prompt", max_tokens=2 * len(TEXT))
    groups = drafter._groups
    for number in range(20):
        write(drafter, make_request(str(number), prompt=[number, 4]), TEXT)
        assert groups.num_tokens <= 2 * len(TEXT)
    assert len(groups) == 2
    seen = []
    for number in range(17, 20):
        request = make_request(f"again-{number}", prompt=[number, 4])
        request.tokens += TEXT[:5]
        seen.append(propose(drafter, request) != [[]])
    assert seen == [False, False, True]  # the first of them took the place of the second


def test_a_group_larger_than_the_bound_starts_again():
    drafter, one = make_drafter(max_tokens=30), make_request("r#0")
    write(drafter, one, [*range(100, 160), *TEXT])
    assert 0 < drafter._groups.num_tokens <= 30
    other = make_request("r#1")
    other.tokens += TEXT[:8]
    assert propose(drafter, other) == [TEXT[8:]]


def test_a_long_text_is_added_over_several_steps():
    drafter, one, other = make_drafter(), make_request("r#0"), make_request("r#1")
    one.tokens += range(100, 100 + 2 * STEP_TOKENS)
    other.tokens += one.tokens[-6:-3]
    assert propose(drafter, one, other)[1] == []
    assert propose(drafter, one, other)[1] == one.tokens[-3:]


def test_forgetting_an_adapter_forgets_its_answers():
    drafter = make_drafter("prompt")
    running = make_request("a", namespace=A)
    write(drafter, running, TEXT)
    write(drafter, make_request("b", namespace=(b"t", b"other")), TEXT)
    drafter.forget_adapter(A[1])
    running.tokens += [1, 2, 3]
    finish(drafter, running)
    assert drafter._groups.num_tokens == len(TEXT)
    mine, theirs = make_request("c", namespace=A), make_request("d", namespace=(b"t", b"other"))
    for request in (mine, theirs):
        request.tokens += TEXT[:5]
    assert propose(drafter, mine, theirs) == [[], TEXT[5:]]


def test_requests_that_are_never_drafted_for_add_nothing():
    drafter = make_drafter()
    write(drafter, make_request("r#0", speculative=False), TEXT)
    assert (len(drafter._groups), drafter._groups.num_tokens) == (0, 0)


def test_a_name_used_again_is_a_new_request():
    drafter = make_drafter()
    write(drafter, make_request("r#0"), TEXT)
    again = make_request("r#0", "h", B)
    again.tokens += TEXT[:5]
    assert propose(drafter, again) == [[]]


def test_the_own_text_is_drafted_if_more_of_it_is_expected_to_be_right():
    drafter, one, other = make_drafter(), make_request("r#0"), make_request("r#1")
    write(drafter, one, [50, 51, 60, 61])
    other.tokens += [1, 2, 3, 50, 51, 70, 71, 72, 1, 2, 3, 50, 51]
    assert propose(drafter, other, max_drafts=3) == [[70, 71, 72]]


def test_drafts_have_a_confidence_and_the_length_of_a_match_with_the_same_odds():
    drafter = NgramDrafter(1, 5, by_match=True, groups=AnswerGroups("request", 1000))
    for number in range(9):
        write(drafter, make_request(f"r#{number}"), TEXT)
    fresh = make_request("r#9")
    for is_rated in (True, False):
        (proposal,) = drafter.propose([row(fresh, 4, is_rated=is_rated)], TargetOutput())
        drafts = proposal.drafts
        assert list(drafts.token_ids) == TEXT[:4]
        assert len(drafts.confidence) == (4 if is_rated else 0)
    assert drafts.match_length >= 4


def test_options():
    config = {"method": "ngram"}
    assert make_groups(parse_speculative(config)) is not None
    assert make_groups(parse_speculative(config | {"group_drafts": "off"})) is None
    largest = parse_speculative(config | {"group_drafts": "prompt", "group_max_tokens": 1 << 24})
    drafter = NgramDrafter(1, 5, groups=make_groups(largest))
    write(drafter, make_request("a", None), TEXT)
    assert drafter._groups.num_tokens == len(TEXT)
