"""Draft weights that are learnt from the traffic of a tenant: acceptance recovers; other tenants' drafts stay."""

from __future__ import annotations

import pytest

from outrider import SamplingParams
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.weight_source import WeightSource
from outrider.spec_decode.learning import learner
from outrider.spec_decode.learning.head_trainer import HeadTrainer
from outrider.spec_decode.learning.learner import JUDGED_STEPS

LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 3}
PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
TASK = [[7, 9, 11, first, second] for first in range(20, 24) for second in (30, 31, 32)]
"""Prompts of a narrow task."""
NEXT_TASK = [[120, first, second, 140] for first in range(90, 94) for second in (60, 61, 62)]
"""Prompts of the task that it drifts to."""
NUM_REQUESTS = 48
"""Requests after which at least five times as many drafts are accepted as at first."""


def speculative(models, **learn):
    """A `speculative_config` in which the tenant "ours" learns, in `train` alone."""
    learn = {"tenants": ["ours"], "share": 1.0, "learning_rate": 0.003, "max_running": 0, **learn}
    return {**models.speculative("eagle3", 3), "learn": learn}


def train(engine):
    """Let the engine train until there is nothing left."""
    for _ in range(5000):
        if engine.learn() is None:
            return
    raise AssertionError("training did not end")


def acceptance(outcomes):
    """Accepted drafts a verification."""
    counts = [outcome.speculation for outcome in outcomes]
    return sum(c.num_accepted_tokens for c in counts) / sum(c.num_verifications for c in counts)


def texts(outcomes):
    return [outcome.token_ids for outcome in outcomes]


@pytest.fixture(autouse=True)
def whole_slices(monkeypatch):
    """Slices do not shrink, however busy the machine is."""
    monkeypatch.setattr(learner, "SLICE_SECONDS", 60.0)


@pytest.fixture
def make_jobs(models):
    """make_jobs(tenant, adapter) -> the task's requests of a tenant. The head has never seen adapter `c`'s text."""

    def make_jobs(tenant, adapter="c", task=TASK, **fields):
        return [(prompt, PARAMS, models.lora(adapter), {"tenant": tenant, **fields}) for prompt in task]

    return make_jobs


class Drafts:
    """Records the drafts of an engine by tenant."""

    def __init__(self, engine):
        self.by_tenant = {}
        drafter = engine._runner._drafter
        propose = drafter.propose

        def recording(rows, target):
            proposals = propose(rows, target)
            for row, proposal in zip(rows, proposals, strict=True):
                if proposal.drafts.token_ids:
                    made = self.by_tenant.setdefault(row.request.tenant, [])
                    made.append((list(row.tokens), list(proposal.drafts.token_ids)))
            return proposals

        drafter.propose = recording

    def pop(self, tenant):
        """Tokens and the drafts that follow them, since the last call, in an order that does not depend on steps."""
        return sorted(self.by_tenant.pop(tenant))


def test_acceptance_recovers_and_other_tenants_drafts_stay(models, make_engine, run, plain_tokens, make_jobs):
    engine = make_engine(**LORA, enable_prefix_caching=False, speculative_config=speculative(models))
    drafts, ours, theirs = Drafts(engine), make_jobs("ours"), make_jobs("theirs")
    drifted, untrained = make_jobs("ours", task=NEXT_TASK), acceptance(run(engine, theirs))
    their_drafts = drafts.pop("theirs")

    def serve(jobs):
        """Acceptance of the first round of some jobs, and after `NUM_REQUESTS` of them."""
        first = acceptance(run(engine, jobs))
        train(engine)
        for _ in range(NUM_REQUESTS // len(jobs) - 1):
            run(engine, jobs)
            train(engine)
        outcomes = run(engine, jobs)
        assert texts(outcomes) == plain_tokens(jobs)
        return first, acceptance(outcomes)

    first, learnt = serve(ours)
    assert first == pytest.approx(untrained)
    assert learnt > 5 * first
    fallen, recovered = serve(drifted)
    print(f"acceptance length - 1: {first:.3f} to {learnt:.3f}, then {fallen:.3f} to {recovered:.3f}")
    assert fallen < learnt / 2
    assert recovered > 5 * fallen

    assert texts(run(engine, theirs)) == plain_tokens(theirs)
    assert drafts.pop("theirs") == their_drafts
    salted = run(engine, make_jobs("ours", cache_salt="pepper"))
    assert acceptance(salted) == pytest.approx(untrained), "another salt used the weights"
    assert [state.tenant for state in engine.learner.states()] == ["ours", "ours"]
    assert engine.learner.states()[-1].num_versions == 0


def test_learning_starts_from_the_adapters_draft_weights(
    models, make_engine, run, plain_tokens, make_jobs, monkeypatch
):
    """A version that was not trained computes what they do, and both kinds run in one batch."""
    monkeypatch.setattr(HeadTrainer, "step", lambda *args: None)
    engine = make_engine(**LORA, enable_prefix_caching=False, speculative_config=speculative(models))
    drafts, ours = Drafts(engine), make_jobs("ours", "a")
    run(engine, ours)
    before = drafts.pop("ours")
    train(engine)
    assert engine.learner.states()[0].num_versions == 1
    mixed = [*ours, *make_jobs("theirs", "a"), *make_jobs("theirs", "b")]
    assert texts(run(engine, mixed)) == plain_tokens(mixed)
    assert drafts.pop("ours") == before


def test_trained_weights_that_accept_less_are_dropped(models, make_engine, run, plain_tokens, make_jobs, monkeypatch):
    engine = make_engine(**LORA, enable_prefix_caching=False, speculative_config=speculative(models))
    ours = make_jobs("ours", None)
    run(engine, ours)
    train(engine)
    good = run(engine, ours)
    kept = engine.learner.states()[0]
    assert kept.num_versions == 1
    with monkeypatch.context() as patch:
        patch.setattr(HeadTrainer, "step", lambda _, lora, sample: [b.data.normal_() for _, b in lora.pairs.values()])
        train(engine)
    worse = engine.stats().learning[0]
    assert worse.digest != kept.digest
    assert worse.acceptance_before == kept.acceptance
    assert texts(run(engine, ours)) == plain_tokens(ours), "text depends on the weights"
    state = engine.learner.states()[0]
    assert (state.num_versions, state.num_dropped, state.digest) == (2, 1, kept.digest)
    assert acceptance(run(engine, ours)) == pytest.approx(acceptance(good), rel=0.2)
    assert sum(outcome.speculation.num_verifications for outcome in good) > JUDGED_STEPS


def test_unloading_an_adapter_drops_its_learner(models, make_engine, run, make_jobs):
    engine = make_engine(**LORA, speculative_config=speculative(models, max_learners=2))
    run(engine, make_jobs("ours", "c"))
    run(engine, make_jobs("ours", None))
    assert [state.adapter for state in engine.stats().learning] == ["c", ""]
    engine.adapters.unload("c")
    assert [state.adapter for state in engine.learner.states()] == [""]


def test_a_sleeping_engine_does_not_train(models, make_engine, run, make_jobs):
    engine = make_engine(**LORA, speculative_config=speculative(models))
    run(engine, make_jobs("ours", None))
    engine.release_memory()
    assert engine.learn() is None
    run(engine, make_jobs("theirs", None)[:1])
    assert engine.learn() is not None
    train(engine)


def test_learners_and_bytes_are_bounded(models, make_engine, run, make_jobs):
    engine = make_engine(
        **LORA, speculative_config=speculative(models, tenants=["ours", "mine"], max_learners=1, buffer_bytes=40_000)
    )
    run(engine, make_jobs("ours"))
    assert 0 < engine.learner.states()[0].num_bytes <= 40_000
    train(engine)
    run(engine, make_jobs("mine"))
    assert [(state.tenant, state.num_versions) for state in engine.learner.states()] == [("mine", 0)]


@pytest.mark.parametrize("draft", [False, True])
def test_weights_are_not_replaced_while_drafts_learn(models, make_engine, draft):
    """The head that is trained, and the states that were recorded, are those of the old weights."""
    engine = make_engine(**LORA, speculative_config=speculative(models))
    path = models.speculative("eagle3", 3)["model"] if draft else models.target
    with pytest.raises(InvalidRequestError, match="learn in speculative_config"):
        engine.update_weights([WeightSource(path=str(path))], draft=draft)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_lora": False}, "enable_lora"),
        ({"async_scheduling": True}, "async_scheduling"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
    ],
)
def test_refused_by_name(models, make_engine, options, message):
    with pytest.raises(InvalidRequestError, match=message):
        make_engine(**{**LORA, **options}, speculative_config=speculative(models))
