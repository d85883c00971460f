"""The controller in the engine: the same text as without speculation, whatever it decides."""

import functools
import random

import pytest

from outrider import SamplingParams
from outrider.platform.engine import setup
from outrider.platform.engine.warm_up import warm_up
from outrider.spec_decode import adaptive_factory
from outrider.spec_decode.controller import Controller

NAMES = [None, "a", "b", None, "a", "c"]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, seed=42, max_tokens=24),
    "penalised": SamplingParams(
        temperature=0.7, seed=1, presence_penalty=0.6, repetition_penalty=1.3, min_tokens=6, max_tokens=24, min_p=0.02
    ),
    "restricted": SamplingParams(temperature=0, allowed_token_ids=[*range(3, 12)], stop_token_ids=[9], max_tokens=24),
}
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
OPTIONS = {
    "plain": {},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 9},
    "preempted": {"max_model_len": 112, "block_size": 8, "num_gpu_blocks_override": 17},
}


def text(outcomes):
    return [(o.token_ids, o.finish_reason, o.stop_reason) for o in outcomes]


def adaptive(models, method, k):
    return models.speculative(method, k) | {"adaptive": True}


@pytest.fixture
def jobs(models, prompts):
    def jobs(name):
        return [(p, PARAMS[name], models.lora(n)) for p, n in zip(prompts, NAMES, strict=True)]

    return jobs


@pytest.fixture(scope="module")
def plain_text(models, plain_engine, run, prompts):
    """plain_text(name in PARAMS) -> the text without speculation; made once."""

    @functools.cache
    def plain_text(name):
        work = [(p, PARAMS[name], models.lora(n)) for p, n in zip(prompts, NAMES, strict=True)]
        return text(run(plain_engine, work))

    return plain_text


@pytest.fixture
def short_warm_up(monkeypatch):
    """What steps take matters little to these tests."""
    monkeypatch.setattr(setup, "warm_up", functools.partial(warm_up, seconds=0.1))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
def test_text_is_byte_equal_with_and_without(models, make_engine, plain_text, run, jobs, method, options):
    engine = make_engine(speculative_config=adaptive(models, method, 5), **LORA, **options)
    num_drafted = 0
    for name in PARAMS:
        for _ in range(2):  # the second time from the prefix cache
            outcomes = run(engine, jobs(name))
            assert text(outcomes) == plain_text(name), name
            num_drafted += sum(o.speculation.num_drafts for o in outcomes if o.speculation)
    assert num_drafted > 0


class Recording:
    """A drafter that notes what it drafted: (tokens, adapter's name, drafts)."""

    def __init__(self, drafter) -> None:
        self._drafter, self.log = drafter, []

    def __getattr__(self, name):
        return getattr(self._drafter, name)

    def propose(self, rows, target):
        proposals = self._drafter.propose(rows, target)
        for row, proposal in zip(rows, proposals, strict=True):
            if proposal.drafts.token_ids:
                name = row.request.lora.name if row.request.lora else None
                self.log.append((tuple(row.tokens), name, list(proposal.drafts.token_ids)))
        return proposals


@pytest.fixture
def random_decisions(monkeypatch):
    """In place of those that follow from a clock: in each step another drafter and number for each row, or none."""
    generator = random.Random(5)

    def decide(self, rows, prompt_tokens):
        for row in rows:
            row.drafter = generator.randrange(len(row.lane.rates))
            row.num_drafts = min(generator.choice((0, 0, 1, 3, 5)), row.limit)
        if generator.random() < 0.5:  # else in the next step again
            self._next_decision = self._step + generator.randint(2, 6)

    monkeypatch.setattr(Controller, "decide", decide)
    monkeypatch.setattr(adaptive_factory, "_LOOKUP_MIN", 1)  # so that prompt lookup, too, finds something often


@pytest.mark.parametrize("options", ["plain", "chunked", "preempted"])
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "medusa"])
@pytest.mark.usefixtures("random_decisions", "short_warm_up")
def test_drafters_that_take_turns(models, make_engine, plain_text, run, jobs, method, options):
    """The text is the same, both drafters are asked, and one that lagged drafts as one does that never did."""
    engine = make_engine(speculative_config=adaptive(models, method, 5), **LORA, **OPTIONS[options])
    drafters = engine._runner._proposer._drafters
    neural, lookup = drafters._drafters = [Recording(drafter) for drafter in drafters]
    memory, places = engine._runner._memory, []
    assert (memory is not None) == (method == "eagle3" and engine._runner._model.can_copy)
    if memory is not None:
        copies = memory.copies
        memory.copies = lambda place: places.append(place) or copies(place)
    for name in ("seeded", "greedy", "greedy"):  # the last one from the prefix cache
        mark = len(neural.log)
        assert text(run(engine, jobs(name))) == plain_text(name), name
    assert len(neural.log) > mark > 10
    assert len(lookup.log) > 10
    assert len(places) > 10 or memory is None, "the target kept hidden states of steps without drafts"
    fixed = make_engine(speculative_config=models.speculative(method, 5), enable_prefix_caching=False, **LORA)
    fresh = fixed._runner._proposer = Recording(fixed._runner._proposer)
    params = PARAMS["greedy"].clone(max_tokens=7)
    run(fixed, [(tokens[:-1], params, models.lora(name)) for tokens, name, _ in neural.log[mark:]])
    longest = {(tokens, name): drafts for tokens, name, drafts in sorted(fresh.log, key=lambda entry: len(entry[2]))}
    for tokens, name, drafts in neural.log[mark:]:
        assert longest[tokens, name][: len(drafts)] == drafts


def test_requests_switch_it_off_or_cap_it(models, make_engine, run, prompts):
    engine = make_engine(speculative_config=adaptive(models, "draft_model", 4))
    params = PARAMS["greedy"]
    wants = (None, False, 2)
    outcomes = run(engine, [(prompts[0], params.clone(speculative=w)) for w in wants])
    assert len({tuple(o.token_ids) for o in outcomes}) == 1
    assert outcomes[1].speculation is None
    assert max(len(d) for d in outcomes[1].deltas) == 1
    assert max(len(d) for d in outcomes[2].deltas) <= 3


def test_nothing_is_kept_of_finished_requests(models, make_engine, run, prompts, jobs):
    engine = make_engine(speculative_config=adaptive(models, "draft_model", 3), **LORA)
    proposer = engine._runner._proposer
    run(engine, jobs("greedy"))
    run(engine, [(prompts[0], PARAMS["greedy"])])
    proposer._rest = 0  # if it rests, which is a matter of time, the next step is looked at
    run(engine, [(prompts[1], SamplingParams(max_tokens=1))])
    assert len(proposer._known) == 1  # the last batch's, until the next
    known = proposer.snapshot()
    assert len({adapter for adapter, _ in known}) == 4  # the base model and three adapters
    assert set(known) > {(adapter, True) for adapter, _ in known}, "what is greedy is told from what is sampled"
    assert {entry["drafter"] for entry in known.values()} <= {"draft_model", "ngram"}
