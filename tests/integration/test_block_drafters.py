"""DFlash and DSpark drafters in engines: the drafts are those of a dense reference, whatever the schedule."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch

from outrider import LoRARequest, SamplingParams
from outrider.platform.core.messages import EngineRequest

from ..block_heads import BlockHead
from ..reference_target import ReferenceTarget
from .conftest import VOCAB

GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=3, top_k=20, max_tokens=14, ignore_eos=True)


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


def serve(engine, jobs, check=lambda request: None):
    """Tokens of each (prompt, params, adapter); `check` judges the drafts after every step."""
    outputs = {}
    for index, (prompt, params, *lora) in enumerate(jobs):
        outputs[str(index)] = []
        engine.add_request(EngineRequest(str(index), list(prompt), params, [1], lora=lora[0] if lora else None))
    while engine.has_work():
        for delta in engine.step():
            outputs[delta.request_id] += delta.token_ids
        for request in engine.scheduler.running:
            check(request)
    return list(outputs.values())


def counts(engine):
    entries = [entry.counts for entry in engine.stats().speculation]
    return sum(c.num_draft_tokens for c in entries), sum(c.num_accepted_tokens for c in entries)


SCHEDULES = {
    "chunks": {"max_num_batched_tokens": 16},
    "preempted": {"num_gpu_blocks_override": 22, "block_size": 8, "max_model_len": 128, "enable_prefix_caching": False},
    "swapped": {
        "num_gpu_blocks_override": 22,
        "block_size": 8,
        "max_model_len": 128,
        "swap_space": 0.01,
        "preemption_mode": "swap",
    },
    "overlapped": {"async_scheduling": True},
    "small blocks": {"block_size": 4},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("method", "kind"), [("dflash", "vanilla"), ("dspark", "rnn")])
def test_drafts_are_those_of_the_reference(make_head, make_engine, plain_tokens, prompts, method, kind, schedule):
    """Twice: the second time from the prefix cache, after requests without drafts too."""
    head, config = make_head(method, kind=kind)
    jobs = [(prompt, params) for prompt in prompts for params in (GREEDY, SEEDED)]
    silent = [(prompt, params.clone(speculative=False)) for prompt, params in jobs]
    engine = make_engine(speculative_config=config, **SCHEDULES[schedule])
    checked = []

    def check(request) -> None:
        drafts = request.drafts.token_ids
        if request.params.temperature == 0 and len(drafts) and not request.in_flight and len(checked) < 24:
            checked.append(len(drafts))
            head.check_greedy(request.tokens, drafts)

    expected = plain_tokens([(*job, None) for job in jobs])
    assert serve(engine, silent[::2] + jobs[1::2]) == expected[::2] + expected[1::2]
    for _ in range(2):
        assert serve(engine, jobs, check) == expected
    assert engine.stats().prefix_cache_hits > 0 or schedule == "preempted"
    assert (engine.stats().num_preemptions > 0) == ("num_gpu_blocks_override" in SCHEDULES[schedule])
    assert len(checked) > 5 or schedule == "overlapped"
    assert counts(engine)[0] > 0


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


def lora_for(head: BlockHead, rank: int, seed: int) -> tuple[dict, BlockHead]:
    """A LoRA of all projections of a drafter, to be scaled by 1.5, and the drafter with it merged."""
    generator = torch.Generator().manual_seed(seed)
    merged, lora = copy.deepcopy(head), {}
    for name, weight in merged.weights.items():
        if name.endswith(("_proj.weight", "fc.weight")) and "head" not in name:
            a = 0.2 * torch.randn(rank, weight.shape[1], generator=generator)
            b = 0.2 * torch.randn(len(weight), rank, generator=generator)
            key = f"base_model.model.{name.removesuffix('weight')}"
            lora |= {f"{key}lora_A.weight": a, f"{key}lora_B.weight": b}
            weight += 1.5 * b @ a
    return lora, merged


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_adapters_bring_draft_weights(models, make_head, make_engine, plain_tokens, prompts, tmp_path, method):
    """Different ones in one batch; the context's keys and values are those of the adapter's drafter too."""
    from peft import PeftModel
    from safetensors.torch import save_file

    head, config = make_head(method)
    merged, requests = {None: head}, {None: None}
    for name, rank in (("a", 2), ("b", 4), ("c", 0)):
        folder = tmp_path / name
        shutil.copytree(models.adapters[name], folder, ignore=shutil.ignore_patterns("draft"))
        tuned = PeftModel.from_pretrained(models.reference(), models.adapters[name]).merge_and_unload()
        merged[name] = copy.deepcopy(head)
        if rank:
            lora, merged[name] = lora_for(head, rank, rank)
            nested = folder / "draft" / method
            nested.mkdir(parents=True)
            save_file(lora, nested / "adapter_model.safetensors")
            settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 1.5 * rank}
            (nested / "adapter_config.json").write_text(json.dumps(settings))
        merged[name].target = ReferenceTarget(tuned)
        requests[name] = LoRARequest(name, path=str(folder))
    engine = make_engine(speculative_config=config, enable_lora=True, max_loras=3, max_lora_rank=8)
    names = [None, "a", "b", "c", "a", "b"]
    jobs = [(prompt, GREEDY, requests[name]) for prompt, name in zip(prompts, names, strict=True)]
    checked = []

    def check(request) -> None:
        name = request.lora.name if request.lora else None
        if len(request.drafts.token_ids):
            checked.append(name)
            merged[name].check_greedy(request.tokens, request.drafts.token_ids)

    plain = [(prompt, GREEDY, models.lora(name)) for prompt, name in zip(prompts, names, strict=True)]
    for _ in range(2):
        assert serve(engine, jobs, check) == plain_tokens(plain)
    assert set(checked) == {None, "a", "b", "c"}
    assert {info.name: info.draft for info in engine.adapters.list()} == {"a": "loaded", "b": "loaded", "c": ""}
    own = [name for name in ("a", "b") for prompt in prompts[:1] if _differs(merged[name], head, prompt)]
    assert own, "the draft weights change what is drafted"


def _differs(one: BlockHead, other: BlockHead, prompt: list[int]) -> bool:
    logits = [torch.stack(head.logits(prompt, [3, 4, 5])).argmax(-1) for head in (one, other)]
    return not torch.equal(*logits)
