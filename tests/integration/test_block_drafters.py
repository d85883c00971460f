"""DFlash and DSpark drafters in engines: the drafts are those of a dense reference, whatever the schedule."""

from __future__ import annotations

import copy

import pytest
import torch

from ..block_heads import BlockHead
from ..reference_target import ReferenceTarget
from .conftest import VOCAB
from .drafted import GREEDY, SCHEDULES, SEEDED, check_draft_weights, check_schedule, counts, serve


@pytest.fixture(scope="module")
def target(models):
    return ReferenceTarget(models.reference())


@pytest.fixture
def make_head(target, tmp_path):
    """make_head(method, **options) -> a reference, and the `speculative_config` of its files."""

    def make(method, k=3, **options):
        head = BlockHead(target, method, **{"aux": (0, 1), "block_size": 5} | options)
        path = head.save(tmp_path / method)
        return head, {"method": method, "model": str(path), "num_speculative_tokens": k}

    return make


@pytest.mark.parametrize(
    ("method", "kind", "schedule"),
    [
        *(("dspark", "rnn", schedule) for schedule in SCHEDULES),
        *(("dflash", "vanilla", schedule) for schedule in ("chunks", "preempted", "overlapped")),
    ],
)
def test_drafts_are_those_of_the_reference(make_head, make_engine, plain_tokens, prompts, method, kind, schedule):
    head, config = make_head(method, kind=kind)
    jobs = [(prompt, params) for prompt in prompts for params in (GREEDY, SEEDED)]
    check_schedule(make_engine(speculative_config=config, **SCHEDULES[schedule]), schedule, head, plain_tokens, jobs)


def bigrams(head: BlockHead, model) -> None:
    """A target whose next token depends on the last one alone, and a Markov head that knows it."""
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.data.zero_()
    with torch.inference_mode():
        every = model.model.norm(model.model.embed_tokens(torch.arange(VOCAB)))
    head.weights["lm_head.weight"] = torch.zeros(VOCAB, 48)
    head.weights["markov_head.markov_w1.weight"] = every.clone()
    head.weights["markov_head.markov_w2.weight"] = model.lm_head.weight.detach().clone()
    head.weights["confidence_head.proj.weight"] = torch.zeros(1, 96)
    head.weights["confidence_head.proj.bias"] = torch.full((1,), 9.0)


@pytest.mark.parametrize("k", [2, 5])
def test_all_drafts_of_a_perfect_head_are_accepted(models, target, make_engine, prompts, tmp_path, k):
    model = copy.deepcopy(target.model)
    head = BlockHead(ReferenceTarget(model), "dspark", aux=(0, 1), block_size=5, own_head=True)
    head.rank = 48
    bigrams(head, model)
    model.save_pretrained(tmp_path / "target")
    config = {"method": "dspark", "model": str(head.save(tmp_path / "head")), "num_speculative_tokens": k}
    jobs = [(prompt, params) for prompt in prompts for params in (GREEDY, SEEDED)]
    expected = serve(make_engine(model=str(tmp_path / "target")), jobs)
    engine = make_engine(model=str(tmp_path / "target"), speculative_config=config)
    assert serve(engine, jobs) == expected
    drafted, accepted = counts(engine)
    assert drafted == accepted > 0


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_adapters_bring_draft_weights(models, make_head, make_engine, plain_tokens, prompts, tmp_path, method):
    """Different ones in one batch; the context's keys and values are those of the adapter's drafter too."""
    head, config = make_head(method)
    engine = make_engine(speculative_config=config, enable_lora=True, max_loras=3, max_lora_rank=8)
    merged = check_draft_weights(models, head, method, engine, plain_tokens, prompts, tmp_path)
    own = [name for name in ("a", "b") if _differs(merged[name], head, prompts[0])]
    assert own, "the draft weights change what is drafted"


def _differs(one: BlockHead, other: BlockHead, prompt: list[int]) -> bool:
    logits = [torch.stack(head.logits(prompt, [3, 4, 5])).argmax(-1) for head in (one, other)]
    return not torch.equal(*logits)
