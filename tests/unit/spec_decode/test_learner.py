"""The learner's bounds of time and memory, with a trainer that only counts, and its options."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from outrider import SamplingParams
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.learn_config import LearnConfig, parse_learn
from outrider.platform.core.request import Request, Status
from outrider.platform.core.speculative_config import parse_speculative
from outrider.spec_decode.drafters.base import DraftRow
from outrider.spec_decode.learning.learner import Learner
from outrider.spec_decode.learning.traffic import Traffic


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Trainer:
    """A trainer whose steps take time in proportion to their labels."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.sizes = clock, seconds, []

    def fits(self, weights):
        return True

    def start(self, weights):
        return SimpleNamespace(weights=dict)

    def step(self, lora, sample):
        self.sizes.append(sample.num_labels)
        self.clock.now += self.seconds * sample.num_labels


class Rows:
    def write(self, slot, weights):
        return SimpleNamespace(digest=bytes([slot]), weights=weights)


class Store:
    def read(self, block_tables, starts, counts):
        return torch.zeros(sum(counts), 4)


def finished(number, tenant="a", tokens=300):
    request = Request(str(number), list(range(tokens)), 4, SamplingParams(), 0, tenant=tenant, status=Status.FINISHED)
    request.text_namespace = (tenant.encode(), b"")
    return DraftRow(request, request.tokens, tokens, 0, 0, [0], sampled=True)


def make(seconds, tenants=("a",), **options):
    clock = Clock()
    trainer = Trainer(clock, seconds)
    learner = Learner(LearnConfig(tenants=tenants, **options), trainer, Rows(), lambda digest: {}, clock=clock)
    return clock, trainer, learner


def test_training_takes_its_share_of_time():
    clock, trainer, learner = make(seconds=0.0002)
    learner.observe([finished(1)], Store())
    trained = 0.0
    while (due := learner.work()) is not None:
        trained = sum(trainer.sizes) * 0.0002
        clock.now += due
    assert trained <= 0.05 * clock.now + learner.longest_slice
    assert trained > 0.04 * clock.now
    assert learner.states()[0].num_versions == 1
    clock.now += 10.0
    assert learner.work() is None, "there is no new text"


def test_long_slices_shrink():
    _, trainer, learner = make(seconds=0.001, share=1.0)
    learner.observe([finished(1)], Store())
    while learner.work() is not None:
        pass
    assert trainer.sizes[0] > 32
    assert max(trainer.sizes[2:]) <= 20


def test_only_tenants_that_opted_in_are_recorded():
    _, _, learner = make(seconds=0.0)
    learner.observe([finished(1, tenant="b")], Store())
    assert learner.states() == []
    assert learner.work() is None


def test_a_request_that_ends_in_its_prompt_is_not_recorded():
    _, _, learner = make(seconds=0.0)
    learner.observe([finished(1)._replace(num_valid=2)], Store())
    assert learner.states() == []


def test_weights_that_are_not_finite_are_not_used():
    _, trainer, learner = make(seconds=0.0)
    nan = {"layers.0.self_attn.q_proj": (torch.zeros(1, 4), torch.full((1, 4), torch.nan))}
    trainer.start = lambda weights: SimpleNamespace(weights=lambda: nan)
    learner.observe([finished(1)], Store())
    while learner.work() is not None:
        pass
    assert trainer.sizes
    assert learner.states()[0].num_versions == 0


@pytest.mark.parametrize("broken", ["step", "start", "read"])
def test_an_error_ends_the_training_of_one_tenant_alone(broken):
    """Text that cannot be recorded or trained takes down neither the step nor the tenants whose text can be."""
    _, trainer, learner = make(seconds=0.0, share=1.0, tenants=("a", "b"), max_learners=1)
    store, calls = Store(), []
    part = store if broken == "read" else trainer
    works = getattr(part, broken)

    def fails(*args):
        calls.append(args)
        raise RuntimeError("out of memory")

    setattr(part, broken, fails)
    learner.observe([finished(1)], store)
    assert broken != "step" or learner.work() is not None
    assert len(calls) == 1
    setattr(part, broken, works)
    learner.observe([finished(2, tenant="b")], store)
    while learner.work() is not None:
        pass
    assert [(state.tenant, state.num_versions) for state in learner.states()] == [("b", 1)]


def test_traffic_drops_the_oldest():
    traffic = Traffic(max_bytes=10_000)
    for number in range(20):
        traffic.add(torch.full((100,), number), torch.zeros(100, 8), 10)
    assert 0 < traffic.num_bytes <= 10_000
    assert traffic.num_bytes == sum(sample.num_bytes for sample in traffic.samples)
    assert traffic.num_labels == sum(sample.num_labels for sample in traffic.samples)
    assert {int(sample.ids[0]) for sample in traffic.samples} <= {18, 19}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("acme", "must be an object"),
        ({}, "tenants must be a list"),
        ({"tenants": []}, "tenants must be a list"),
        ({"tenants": ["a"], "share": 2}, "share must be in"),
        ({"tenants": ["a"], "rank": 1.5}, "rank must be an integer"),
        ({"tenants": ["a"], "rnk": 1}, "unknown field 'rnk'"),
    ],
)
def test_wrong_options_are_named(given, message):
    with pytest.raises(InvalidRequestError, match=message):
        parse_learn(given)


def test_off_by_default_and_for_heads_alone():
    assert parse_speculative({"method": "eagle3", "model": "x"}).learn is None
    with pytest.raises(InvalidRequestError, match="learn means nothing to method ngram"):
        parse_speculative({"method": "ngram", "learn": {"tenants": ["a"]}})
