"""EAGLE-3 heads of several layers and P-EAGLE heads in engines: the drafts are those of a dense reference, whatever the
schedule, and the text is the target's own."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional as F

from outrider import SamplingParams

from ..eagle_heads import Head
from ..reference_target import ReferenceTarget
from .drafted import GREEDY, SCHEDULES, SEEDED, check_draft_weights, check_schedule, counts, serve
from .test_speculation import check_frequencies, exact_third_token

PENALTIES = SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=14, ignore_eos=True)
HEADS = {"three layers": {"layers": 3}, "parallel": {"layers": 2, "mask_token": 5, "speculators": True}}


@pytest.fixture(scope="module")
def target(models):
    return ReferenceTarget(models.reference())


@pytest.fixture(params=HEADS.values(), ids=HEADS)
def head(request, target):
    return Head(target, "eagle3", **request.param)


@pytest.fixture
def config(head, tmp_path):
    return {"method": "eagle3", "model": str(head.save(tmp_path / "head")), "num_speculative_tokens": 3}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_drafts_are_those_of_the_reference(head, config, make_engine, plain_tokens, prompts, schedule):
    jobs = [(prompt, params) for prompt in prompts for params in (GREEDY, SEEDED, PENALTIES)]
    check_schedule(make_engine(speculative_config=config, **SCHEDULES[schedule]), schedule, head, plain_tokens, jobs)


def learn(head: Head, prompts: list[list[int]], texts: list[list[int]]) -> None:
    """Train a head for a few steps on the texts, each position's next token, and those of two masks somewhere."""
    weights = [tensor.requires_grad_() for name, tensor in head.weights.items()]
    optimizer, rng = torch.optim.Adam(weights, lr=0.01), random.Random(0)
    states = [[state.clone() for state in head.target.states(text)] for text in texts]
    for _ in range(40):
        optimizer.zero_grad()
        for prompt, text, state in zip(prompts, texts, states, strict=True):
            masks = 0 if head.mask_token is None else 2
            end = rng.randint(len(prompt), len(text) - 2 - masks)
            known = head.fuse([part[:end] for part in state])
            read = text[1 : end + 1] + [head.mask_token] * masks
            _, logits = head.forward(read, torch.cat((known, head.mask_states(masks))) if masks else known)
            start = len(prompt) - 1
            wanted = torch.tensor(text[start + 2 : end + 2 + masks])
            F.cross_entropy(logits[start:], wanted).backward()
        optimizer.step()
    for tensor in weights:
        tensor.requires_grad_(False)


def test_overlapped_steps_accept_as_many_drafts(head, make_engine, plain_tokens, prompts, tmp_path):
    """After rejected drafts of which only the device knows: of a head that is right sometimes, as many drafts are
    accepted as without overlap."""
    jobs, accepted = [(prompt, GREEDY) for prompt in prompts], []
    learn(head, prompts, [p + t for p, t in zip(prompts, plain_tokens([(*job, None) for job in jobs]), strict=True)])
    config = {"method": "eagle3", "model": str(head.save(tmp_path / "learned")), "num_speculative_tokens": 3}
    for overlapped in (False, True):
        engine = make_engine(speculative_config=config, async_scheduling=overlapped, enable_prefix_caching=False)
        serve(engine, jobs)
        drafted, right = counts(engine)
        accepted.append(right)
    assert 0.3 * drafted < accepted[0] < drafted
    assert abs(accepted[0] - accepted[1]) <= 6, "the last steps of the six requests may differ"


def test_sampled_requests_keep_the_targets_distribution(target, make_engine, plain_tokens, prompts, run, tmp_path):
    """Rejection sampling of drafts that are drawn independently of each other."""
    head = Head(target, "eagle3", **HEADS["parallel"])
    texts = plain_tokens([(prompt, GREEDY, None) for prompt in prompts])
    learn(head, prompts, [p + t for p, t in zip(prompts, texts, strict=True)])
    config = {"method": "eagle3", "model": str(head.save(tmp_path / "learned")), "num_speculative_tokens": 3}
    engine = make_engine(speculative_config=config, max_num_seqs=200)
    check_frequencies(engine, run, exact_third_token(target.model), count=1000)


def test_adapters_bring_draft_weights(models, head, config, make_engine, plain_tokens, prompts, tmp_path):
    """For every layer; different ones in one batch."""
    engine = make_engine(speculative_config=config, enable_lora=True, max_loras=3, max_lora_rank=8)
    check_draft_weights(models, head, "eagle3", engine, plain_tokens, prompts, tmp_path)
