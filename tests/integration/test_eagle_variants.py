"""EAGLE-3 heads of several layers and P-EAGLE heads in engines: the drafts are those of a dense reference, whatever the
schedule, and the text is the target's own."""

from __future__ import annotations

import copy
import json
import random
import shutil

import pytest
import torch
from torch.nn import functional as F

from outrider import LoRARequest, SamplingParams
from outrider.platform.core.messages import EngineRequest

from ..eagle_heads import Head
from ..reference_target import ReferenceTarget
from .test_speculation import check_frequencies, exact_third_token

GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=3, top_k=20, max_tokens=14, ignore_eos=True)
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
def test_drafts_are_those_of_the_reference(head, config, make_engine, plain_tokens, prompts, schedule):
    """Twice: the second time from the prefix cache, after requests without drafts too."""
    jobs = [(prompt, params) for prompt in prompts for params in (GREEDY, SEEDED, PENALTIES)]
    silent = [(prompt, params.clone(speculative=False)) for prompt, params in jobs]
    engine = make_engine(speculative_config=config, **SCHEDULES[schedule])
    checked = []

    def check(request) -> None:
        drafts = request.drafts.token_ids
        if request.params == GREEDY and len(drafts) and not request.in_flight and len(checked) < 24:
            checked.append(len(drafts))
            head.check_greedy(request.tokens, drafts)

    expected = plain_tokens([(*job, None) for job in jobs])
    assert serve(engine, silent[::2] + jobs[1::2]) == expected[::2] + expected[1::2]
    for _ in range(2):
        assert serve(engine, jobs, check) == expected
    assert engine.stats().prefix_cache_hits > 0 or schedule == "preempted"
    assert (engine.stats().num_preemptions > 0) == ("num_gpu_blocks_override" in SCHEDULES[schedule])
    assert len(checked) > 5 or schedule == "overlapped"
    assert sum(entry.counts.num_draft_tokens for entry in engine.stats().speculation) > 0


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
        counts = [entry.counts for entry in engine.stats().speculation]
        accepted.append(sum(c.num_accepted_tokens for c in counts))
    assert 0.3 * sum(c.num_draft_tokens for c in counts) < accepted[0] < sum(c.num_draft_tokens for c in counts)
    assert abs(accepted[0] - accepted[1]) <= 6, "the last steps of the six requests may differ"


def test_sampled_requests_keep_the_targets_distribution(target, make_engine, plain_tokens, prompts, run, tmp_path):
    """Rejection sampling of drafts that are drawn independently of each other."""
    head = Head(target, "eagle3", **HEADS["parallel"])
    texts = plain_tokens([(prompt, GREEDY, None) for prompt in prompts])
    learn(head, prompts, [p + t for p, t in zip(prompts, texts, strict=True)])
    config = {"method": "eagle3", "model": str(head.save(tmp_path / "learned")), "num_speculative_tokens": 3}
    engine = make_engine(speculative_config=config, max_num_seqs=200)
    check_frequencies(engine, run, exact_third_token(target.model), count=1000)


def lora_for(head: Head, rank: int) -> tuple[dict, Head]:
    """A LoRA of all projections of a head, to be scaled by 1.5, and the head with it merged."""
    generator = torch.Generator().manual_seed(rank)
    merged, lora = copy.deepcopy(head), {}
    for name, weight in merged.weights.items():
        if name.endswith(("_proj.weight", "fc.weight")):
            a = 0.2 * torch.randn(rank, weight.shape[1], generator=generator)
            b = 0.2 * torch.randn(len(weight), rank, generator=generator)
            key = f"base_model.model.{name.removesuffix('weight')}"
            lora |= {f"{key}lora_A.weight": a, f"{key}lora_B.weight": b}
            weight += 1.5 * b @ a
    return lora, merged


def test_adapters_bring_draft_weights(models, head, config, make_engine, plain_tokens, prompts, tmp_path):
    """For every layer; different ones in one batch."""
    from peft import PeftModel
    from safetensors.torch import save_file

    merged, requests = {None: head}, {None: None}
    for name, rank in (("a", 2), ("b", 4), ("c", 0)):
        folder = tmp_path / name
        shutil.copytree(models.adapters[name], folder, ignore=shutil.ignore_patterns("draft"))
        merged[name] = copy.deepcopy(head)
        if rank:
            lora, merged[name] = lora_for(head, rank)
            nested = folder / "draft" / "eagle3"
            nested.mkdir(parents=True)
            save_file(lora, nested / "adapter_model.safetensors")
            settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 1.5 * rank}
            (nested / "adapter_config.json").write_text(json.dumps(settings))
        tuned = PeftModel.from_pretrained(models.reference(), models.adapters[name]).merge_and_unload()
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
