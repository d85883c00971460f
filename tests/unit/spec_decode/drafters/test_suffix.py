"""The suffix drafter: its choice of tree, isolation, and stored text."""

from __future__ import annotations

import random

import pytest

from outrider.platform.core.request import Request, Status
from outrider.platform.core.sampling_params import SamplingParams
from outrider.platform.core.speculative_config import parse_speculative
from outrider.spec_decode.drafters.base import DraftRow, TargetOutput
from outrider.spec_decode.drafters.suffix import drafter as suffix
from outrider.spec_decode.drafters.suffix.drafter import OutputStores, SuffixDrafter, longest_suffix

A, B = (b"tenant-a", b"adapter"), (b"tenant-b", b"adapter")
SECRET = [31, 57, 12, 88, 45, 93, 20, 76, 64, 39]


def make_drafter(**fields) -> SuffixDrafter:
    fields = {f"suffix_decoding_{name}": value for name, value in fields.items()}
    return SuffixDrafter(parse_speculative({"method": "suffix", "num_speculative_tokens": 6} | fields))


def make_request(name="r", namespace=A, prompt=(1,), **params) -> Request:
    prompt = list(prompt)
    return Request(name, prompt, len(prompt), SamplingParams(**params), seed_key=1, text_namespace=namespace)


def row(request: Request, max_drafts: int = 6, sampled: bool = True) -> DraftRow:
    tokens = request.tokens
    return DraftRow(request, tokens, len(tokens) - 1, len(tokens) - 1, max_drafts, [], sampled)


def propose(drafter, *requests, **options) -> list[list[int]]:
    proposals = drafter.propose([row(request, **options) for request in requests], TargetOutput())
    assert [p.num_draft_computed for p in proposals] == [len(request.tokens) for request in requests]
    assert all(p.drafts.probs is None for p in proposals)
    return [p.drafts.token_ids for p in proposals]


def answer(drafter, output, *, namespace=A, name="past", prompt=(1,), **params) -> None:
    """A request that is given `output`, a token a step, and finishes."""
    request = make_request(name, namespace, prompt, **params)
    propose(drafter, request, sampled=False)
    for token in output:
        request.tokens.append(token)
        propose(drafter, request)
    request.status = Status.FINISHED
    propose(drafter)


def test_drafts_come_from_the_requests_own_tokens():
    request = make_request(prompt=[5, 6, 7, 8, 9, 4, 5, 6, 7])
    assert propose(make_drafter(), request) == [[8, 9, 4]]  # as many as tokens matched
    assert propose(make_drafter(max_spec_factor=2.0), request) == [[8, 9, 4, 5, 6, 7]]
    assert propose(make_drafter(max_spec_factor=2.0), request, max_drafts=2) == [[8, 9]]
    assert propose(make_drafter(max_spec_factor=0.4), request) == [[8]]


def test_drafts_come_from_past_outputs():
    drafter = make_drafter()
    answer(drafter, SECRET)
    request = make_request(prompt=[2, 3, *SECRET[1:5]])
    assert propose(drafter, request) == [SECRET[5:9]]


def test_the_context_is_the_longest_at_every_step():
    """Looked up again, independent of the step before, while outputs are added and removed."""
    rng = random.Random(9)
    drafter = make_drafter(max_cached_requests=4, max_spec_factor=32.0, min_token_prob=0.0)
    request = make_request("long", prompt=[50, 51])
    for i in range(120):
        if i % 10 == 0:
            answer(drafter, rng.choices(range(4), k=12), name=f"past-{i}", namespace=rng.choice([A, A, B]))
        request.tokens.append(rng.randrange(5))
        propose(drafter, request)
        tree = drafter.stores.tree(A)
        place = longest_suffix(tree, request.tokens, 24) if tree else None
        if tree:
            assert drafter._live["long"].past[2] == (place.length if place else 0)


def test_prompts_are_not_remembered():
    drafter = make_drafter()
    answer(drafter, [1, 2, 3], prompt=SECRET)
    assert propose(drafter, make_request(prompt=SECRET[:5])) == [[]]
    assert propose(drafter, make_request(prompt=[1, 2])) == [[3]]


def test_the_most_frequent_continuation_wins():
    drafter = make_drafter(max_spec_factor=4.0)
    for end in (70, 80, 70, 80, 80):
        answer(drafter, [10, 11, end, end + 1])
    assert propose(drafter, make_request(prompt=[10, 11])) == [[80, 81]]


def test_unlikely_drafts_are_not_proposed():
    def drafts(min_token_prob):
        drafter = make_drafter(max_spec_factor=4.0, min_token_prob=min_token_prob)
        for i in range(4):
            answer(drafter, [10, 11, 20, 30 + i, 40 + i])
        return propose(drafter, make_request(prompt=[10, 11]))[0]

    assert drafts(0.3) == [20]
    assert drafts(0.25) == [20, 33, 43]


def test_the_tree_that_promises_more_is_used():
    drafter = make_drafter(max_spec_factor=4.0)
    answer(drafter, [10, 11, 12, 13, 14, 15, 16])
    answer(drafter, [10, 11, 12, 13, 14, 15, 16])
    short = make_request(prompt=[11, 12, 9, 9, 9, 11, 12])  # sure of 6 tokens, the past of 4
    assert propose(drafter, short) == [[9, 9, 9, 11, 12, 9]]
    torn = make_request(prompt=[11, 12, 9, 4, 11, 12, 8, 3, 11, 12])  # its own is torn between 9 and 8
    assert propose(drafter, torn) == [[13, 14, 15, 16]]


def test_the_longest_context_wins_over_the_more_frequent_one():
    drafter = make_drafter(max_cached_requests=0)
    request = make_request(prompt=[3, 1, 2, 5, 0, 1, 2, 6, 0, 1, 2, 6, 4, 3, 1, 2])
    assert propose(drafter, request)[0][0] == 5


def test_no_more_than_the_longest_context_is_matched():
    drafter = make_drafter(max_tree_depth=2, max_spec_factor=1.0)
    request = make_request(prompt=[5, 6, 7, 8, 9, 4, 5, 6, 7])
    assert propose(drafter, request) == [[8, 9]]


def test_long_repeats_are_drafted_to_the_full_length():
    """A match as long as the tree is deep still has continuations."""
    text = random.Random(1).choices(range(1000), k=60)
    request = make_request(prompt=text + text[:50])
    assert propose(make_drafter(max_tree_depth=8), request) == [text[50:56]]


@pytest.mark.parametrize(
    ("namespace", "other"),
    [(A, B), ((b"t", b"x"), (b"t", b"y")), ((b"t", b""), (b"t", b"x")), ((b"", b""), (b"s", b""))],
)
def test_nothing_reaches_another_namespace(namespace, other):
    drafter = make_drafter(max_spec_factor=32.0, min_token_prob=0.0)
    for i in range(5):
        answer(drafter, SECRET, namespace=namespace, name=f"past-{i}", prompt=SECRET)
    running = make_request("running", namespace, SECRET)
    for length in range(1, len(SECRET)):
        mine, theirs = make_request("m", namespace, SECRET[:length]), make_request("o", other, SECRET[:length])
        got, leaked = propose(drafter, mine, theirs, running)[:2]
        assert got == SECRET[length : length + 6]
        assert leaked == []
        mine.status = theirs.status = Status.FINISHED


def test_running_requests_do_not_see_each_other():
    first, second = make_request("a", prompt=SECRET), make_request("b", prompt=SECRET[:4])
    assert propose(make_drafter(), first, second) == [[], []]


def test_a_name_used_again_is_a_new_request():
    drafter = make_drafter()
    first = make_request("a", prompt=[1, *SECRET])
    propose(drafter, first)
    first.status = Status.FINISHED
    assert propose(drafter, make_request("a", B, [3, *SECRET[:3]])) == [[]]


def test_tokens_after_the_end_of_an_output_are_not_stored():
    """The drafter sees the sampled tokens before the engine cuts them at a stop token."""
    drafter, request = make_drafter(), make_request(prompt=[1, 2])
    full = request.tokens + SECRET
    drafter.propose([row(request)._replace(tokens=full)], TargetOutput())
    request.tokens += SECRET[:4]
    request.status = Status.FINISHED
    assert propose(drafter, make_request("n", prompt=SECRET[:2])) == [SECRET[2:4]]
    assert drafter.stores.num_tokens == 4


def test_zero_cached_requests_is_the_own_tree_alone():
    drafter = make_drafter(max_cached_requests=0)
    answer(drafter, SECRET)
    assert (len(drafter.stores), drafter.stores.num_nodes) == (0, 0)
    assert propose(drafter, make_request(prompt=SECRET[:4])) == [[]]
    assert propose(drafter, make_request("o", prompt=[*SECRET, *SECRET[:4]])) == [SECRET[4:8]]


def test_the_oldest_outputs_leave_first_over_all_namespaces():
    drafter = make_drafter(max_cached_requests=2)
    outputs = [[10 * i + j for j in range(5)] for i in range(1, 5)]
    for output, namespace in zip(outputs, (A, B, A, B), strict=True):
        answer(drafter, output, namespace=namespace)
    assert len(drafter.stores) == 2
    seen = [propose(drafter, make_request(str(i), ns, o[:3]))[0] for i, o in enumerate(outputs) for ns in (A, B)]
    assert [drafts for drafts in seen if drafts] == [[33, 34], [43, 44]]


def test_requests_that_are_never_drafted_for_leave_nothing():
    drafter = make_drafter()
    answer(drafter, SECRET, speculative=False)
    assert not drafter._live
    assert len(drafter.stores) == 0


def test_forgetting_an_adapter_forgets_its_text():
    drafter = make_drafter()
    answer(drafter, SECRET, namespace=(b"a", b"x"))
    answer(drafter, SECRET, namespace=(b"b", b"x"))
    answer(drafter, SECRET, namespace=(b"a", b"y"))
    nodes = drafter.stores.num_nodes
    late = make_request("late", (b"a", b"x"))
    propose(drafter, late)
    late.tokens += SECRET
    late.status = Status.FINISHED  # seen at the next step, after the adapter is gone
    drafter.forget_adapter(b"x")
    assert propose(drafter, make_request("n", (b"a", b"x"), SECRET[:4])) == [[]]
    assert propose(drafter, make_request("o", (b"a", b"y"), SECRET[:4])) == [SECRET[4:8]]
    assert (len(drafter.stores), drafter.stores.num_tokens) == (1, len(SECRET))
    assert drafter.stores.num_nodes == nodes // 3


def test_long_prompts_are_taken_in_over_several_steps(monkeypatch):
    monkeypatch.setattr(suffix, "STEP_TOKENS", 8)
    drafter = make_drafter(max_cached_requests=0)
    request = make_request(prompt=[*range(20, 40), *range(20, 30)])
    taken = []
    for _ in range(4):
        (drafts,) = propose(drafter, request)
        taken.append(len(drafter._live["r"].text.tokens))
        request.tokens.append(request.tokens[-20])
    assert drafts == list(range(33, 39))
    assert taken[0] <= 9
    assert taken[-1] == len(request.tokens) - 1


def test_a_very_long_request_is_known_by_its_end(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_OWN_TOKENS", 100)
    drafter = make_drafter(max_cached_requests=0)
    request = make_request(prompt=[1000, 1001, 1002, *range(90)])
    for token in [*range(200, 210), 1000, 1001, *range(85, 89), *range(60, 63)]:
        request.tokens.append(token)
        (drafts,) = propose(drafter, request)
        assert drafter._live["r"].tree.num_nodes <= 200
        if token == 1001:
            assert drafts == []  # its prefix is forgotten
    assert drafts == [63, 64, 65]


# ------------------------------------------------------------------- the stores


def test_stores_stay_within_their_bounds():
    random.seed(3)
    stores = OutputStores(8, max_outputs=20, max_tokens=300)
    for i in range(200):
        namespace = (random.choice([b"a", b"b", b"c"]), b"")
        stores.add(namespace, [random.randrange(4) for _ in range(random.randrange(60))])
        stores.update_trees(random.choice([0, 5, 1000]))
        if i % 37 == 0:
            stores.forget_adapter(b"other")
        assert len(stores) <= 20
        assert stores.num_tokens == sum(len(output.tokens) for output in stores._outputs) <= 300
        assert stores.num_nodes <= 2 * sum(o.num_counted for q in (stores._outputs, stores._leaving) for o in q)
    stores.update_trees(1000)
    assert not stores._pending
    assert not stores._leaving
    fresh = OutputStores(8, max_outputs=20, max_tokens=300)
    for output in stores._outputs:
        fresh.add(output.namespace, output.tokens)
    fresh.update_trees(1000)
    assert fresh.num_nodes == stores.num_nodes  # nothing is left of the 180 that have gone
    stores.forget_adapter(b"")
    assert (len(stores), stores.num_tokens, stores.num_nodes, stores._trees) == (0, 0, 0, {})


def test_an_output_longer_than_all_is_cut():
    stores = OutputStores(8, max_outputs=5, max_tokens=10)
    stores.add(A, list(range(25)))
    stores.update_trees(100)
    assert stores.num_tokens == 10
    tree = stores.tree(A)
    assert longest_suffix(tree, [14], 8) is None
    assert longest_suffix(tree, [13, 14, 15, 16], 8).length == 2


def test_the_longest_suffix_is_found():
    random.seed(5)
    stores = OutputStores(10, max_outputs=50)
    past = [[random.randrange(3) for _ in range(12)] for _ in range(6)]
    for output in past:
        stores.add(A, output)
    stores.update_trees(1000)
    for _ in range(200):
        tokens = [random.randrange(4) for _ in range(random.randrange(1, 12))]
        place = longest_suffix(stores.tree(A), tokens, 7)
        lengths = [
            length
            for length in range(1, min(7, len(tokens)) + 1)
            if any(tokens[-length:] == o[i : i + length] for o in past for i in range(len(o)))
        ]
        assert (0 if place is None else place.length) == max(lengths, default=0)


def test_requests_that_were_never_drafted_for_are_remembered():
    """They are added and removed while nothing is drafted: others may get the same answers."""
    drafter, gone = make_drafter(), make_request(prompt=[1, 2])
    drafter.watch([row(gone)], TargetOutput())
    gone.tokens += SECRET
    gone.status = Status.FINISHED
    assert propose(drafter, make_request("next", prompt=[9])) == [[]]
    drafter.stores.update_trees(1000)
    assert propose(drafter, make_request("same", prompt=[5, *SECRET[:4]]))[0][:3] == SECRET[4:7]
