"""The controller in the engine: the same text as without speculation, whatever it decides."""

import functools
import math
import random

import pytest

from outrider import SamplingParams
from outrider.spec_decode.control import adapters, factory, policy, trials
from outrider.spec_decode.control.confidence import ConfidenceFit
from outrider.spec_decode.control.goodput import DraftPrice, Plan
from outrider.spec_decode.control.policy import SpeculationPolicy
from outrider.spec_decode.drafters.draft_model import DraftModelDrafter
from outrider.spec_decode.drafters.eagle.drafter import EagleDrafter
from outrider.spec_decode.drafters.medusa.drafter import MedusaDrafter
from outrider.spec_decode.drafters.ngram import NgramDrafter

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
def early_trials(monkeypatch):
    """Drafters are tried at once and again and again, whatever steps and drafts take on this machine."""
    monkeypatch.setattr(adapters, "FIRST_TRIAL_SECONDS", 0.0)
    monkeypatch.setattr(trials, "TRIAL_SHARE", math.inf)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *(("ngram", "preempted"), ("ngram", "no-prefix-cache"), ("suffix", "chunked")),
        *(("draft_model", "plain"), ("draft_model", "preempted"), ("dflash", "preempted"), ("dspark", "chunked")),
    ],
)
@pytest.mark.usefixtures("early_trials")
def test_text_is_byte_equal_with_and_without(models, make_engine, plain_text, run, jobs, method, options):
    """test_speculation.py compares the options for every drafter."""
    engine = make_engine(speculative_config=adaptive(models, method, 5), **LORA, **OPTIONS[options])
    num_drafted = 0
    for name in PARAMS:
        for _ in range(2):  # the second time from the prefix cache
            outcomes = run(engine, jobs(name))
            assert text(outcomes) == plain_text(name), name
            num_drafted += sum(o.speculation.num_verifications for o in outcomes if o.speculation)
    assert num_drafted > 0


@pytest.mark.parametrize("method", ["ngram", "draft_model", "medusa", "dspark"])
def test_drafts_are_left_out_and_the_text_is_the_same(models, make_engine, plain_text, run, jobs, method, monkeypatch):
    """Steps count as long, all drafts are planned, and one costs a third of a token, whatever the times are here."""
    monkeypatch.setattr(policy, "SHORT_STEP", 0.0)
    monkeypatch.setattr(policy, "best_plan", lambda offers, *_, **__: Plan([len(o.survival) for o in offers], 2.0, 1.0))
    monkeypatch.setattr(policy, "draft_price", lambda *_, is_fair, **__: DraftPrice(0.33, is_fair, 0.33, 0.33))
    found, choose = [], ConfidenceFit.num_worthwhile

    def noted(fit, confidence, price, **options):
        found.append((len(confidence), choose(fit, confidence, price, **options)))
        return found[-1][1]

    monkeypatch.setattr(ConfidenceFit, "num_worthwhile", noted)
    engine = make_engine(speculative_config=adaptive(models, method, 5), **LORA)
    for name in ("greedy", "seeded"):
        assert text(run(engine, jobs(name))) == plain_text(name), name
    assert any(kept < made for made, kept in found)
    engine.check_integrity()


@pytest.fixture
def drafted(monkeypatch):
    """By class of drafter, what it drafted: (tokens, adapter's name, drafts)."""
    logs = {}

    def record(kind):
        propose, log = kind.propose, logs.setdefault(kind, [])

        def noted(self, rows, target):
            proposals = propose(self, rows, target)
            for row, proposal in zip(rows, proposals, strict=True):
                if proposal.drafts.token_ids:
                    name = row.request.lora.name if row.request.lora else None
                    log.append((tuple(row.tokens), name, list(proposal.drafts.token_ids)))
            return proposals

        monkeypatch.setattr(kind, "propose", noted)

    for kind in (*NEURAL.values(), NgramDrafter):
        if kind not in logs:
            record(kind)
    return logs


NEURAL = {"draft_model": DraftModelDrafter, "eagle": EagleDrafter, "eagle3": EagleDrafter, "medusa": MedusaDrafter}


@pytest.fixture
def random_choices(monkeypatch):
    """In place of choices that follow from a clock: for some steps another drafter and number for each row, or none."""
    generator, left, chosen = random.Random(5), [0], {}

    def choose(self, rows, *, requests_wait=False):
        left[0] -= 1
        if left[0] < 0:
            left[0] = generator.randint(0, 5)
            chosen.clear()
        for row in rows:
            drafter, count = chosen.setdefault(
                row.request, (generator.choice((0, 0, 1)), generator.choice((0, 1, 3, 5)))
            )
            row.drafter, row.max_new_drafts = drafter, min(count, row.max_new_drafts)

    monkeypatch.setattr(SpeculationPolicy, "choose", choose)
    monkeypatch.setattr(SpeculationPolicy, "plans_no_drafts", property(lambda self: False))
    monkeypatch.setattr(factory, "_LOOKUP_MIN", 1)  # so that prompt lookup, too, finds something often


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((method, "preempted") for method in ("draft_model", "eagle3", "medusa")),
        *((method, "chunked") for method in ("draft_model", "eagle3")),
        ("medusa", "plain"),
    ],
)
@pytest.mark.usefixtures("random_choices")
def test_drafters_in_turn(models, make_engine, plain_text, run, jobs, method, options, drafted):
    """The text is the same, both drafters are asked, and one that lagged drafts as one does that never did."""
    engine = make_engine(speculative_config=adaptive(models, method, 5), **LORA, **OPTIONS[options])
    neural, lookup = drafted[NEURAL[method]], drafted[NgramDrafter]
    for log in (neural, lookup):
        log.clear()  # what was drafted for the measuring at the start
    for name in ("seeded", "greedy", "greedy"):  # the last one from the prefix cache
        mark = len(neural)
        assert text(run(engine, jobs(name))) == plain_text(name), name
    assert len(neural) > mark > 10
    assert len(lookup) > 10
    lagged = neural[mark:]
    fixed = make_engine(speculative_config=models.speculative(method, 5), enable_prefix_caching=False, **LORA)
    neural.clear()
    params = PARAMS["greedy"].clone(max_tokens=7)
    run(fixed, [(tokens[:-1], params, models.lora(name)) for tokens, name, _ in lagged])
    longest = {(tokens, name): drafts for tokens, name, drafts in sorted(neural, key=lambda entry: len(entry[2]))}
    for tokens, name, drafts in lagged:
        assert longest[tokens, name][: len(drafts)] == drafts


def test_requests_disable_or_limit_drafts(models, make_engine, run, prompts):
    engine = make_engine(speculative_config=adaptive(models, "draft_model", 4))
    params = PARAMS["greedy"]
    wants = (None, False, 2)
    outcomes = run(engine, [(prompts[0], params.clone(speculative=w)) for w in wants])
    assert len({tuple(o.token_ids) for o in outcomes}) == 1
    assert outcomes[1].speculation is None
    assert max(len(d) for d in outcomes[1].deltas) == 1
    assert max(len(d) for d in outcomes[2].deltas) <= 3


def test_acceptance_is_known_by_adapter(models, make_engine, run, jobs, monkeypatch):
    policies = []
    observe = SpeculationPolicy.observe
    monkeypatch.setattr(SpeculationPolicy, "observe", lambda self, *args: policies.append(self) or observe(self, *args))
    engine = make_engine(speculative_config=adaptive(models, "draft_model", 3), **LORA)
    run(engine, jobs("greedy"))
    known = policies[-1].snapshot()
    assert len({name.split()[0] for name in known if name.split()[0] != "greedy"}) >= 3, "three adapters"
    assert {entry["drafter"] for entry in known.values()} <= {"draft_model", "ngram"}
