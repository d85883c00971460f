"""What tests of drafters in engines share: schedules, references that judge each step's drafts, adapters with draft
weights."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import torch

from outrider import LoRARequest, SamplingParams
from outrider.platform.core.messages import EngineRequest

from ..reference_target import ReferenceTarget

GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=3, top_k=20, max_tokens=14, ignore_eos=True)
FEW_BLOCKS = {"num_gpu_blocks_override": 22, "block_size": 8, "max_model_len": 128}
SCHEDULES = {
    "chunks": {"max_num_batched_tokens": 16},
    "preempted": {**FEW_BLOCKS, "enable_prefix_caching": False},
    "swapped": {**FEW_BLOCKS, "swap_space": 0.01, "preemption_mode": "swap"},
    "overlapped": {"async_scheduling": True},
    "small blocks": {"block_size": 4},
}
ADAPTERS = [None, "a", "b", "c", "a", "b"]
"""Those of one batch: of them "a" and "b" have draft weights."""


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
    """Drafts and accepted drafts."""
    entries = [entry.counts for entry in engine.stats().speculation]
    return sum(c.num_draft_tokens for c in entries), sum(c.num_accepted_tokens for c in entries)


def check_schedule(engine, schedule, reference, plain_tokens, jobs):
    """The text is that without drafts, and the drafts are the reference's: before and after requests without drafts,
    and again from the prefix cache. Returns how many drafts each step had that was judged."""
    silent = [(prompt, params.clone(speculative=False)) for prompt, params in jobs]
    checked = []

    def check(request) -> None:
        drafts = request.drafts.token_ids
        if request.params == GREEDY and len(drafts) and not request.in_flight and len(checked) < 24:
            checked.append(len(drafts))
            reference.check_greedy(request.tokens, drafts)

    expected = plain_tokens([(*job, None) for job in jobs])
    assert serve(engine, silent[::2] + jobs[1::2]) == expected[::2] + expected[1::2]
    for _ in range(2):
        assert serve(engine, jobs, check) == expected
    assert engine.stats().prefix_cache_hits > 0 or schedule == "preempted"
    assert (engine.stats().num_preemptions > 0) == ("num_gpu_blocks_override" in SCHEDULES[schedule])
    assert len(checked) > 5 or schedule == "overlapped"
    assert counts(engine)[0] > 0
    return checked


def lora_for(head, rank: int) -> tuple[dict, object]:
    """A LoRA of all projections of a head, to be scaled by 1.5, and the head with it merged."""
    generator = torch.Generator().manual_seed(rank)
    merged, lora = copy.deepcopy(head), {}
    for name, weight in merged.weights.items():
        if name.endswith(("_proj.weight", "fc.weight")) and "head" not in name:
            a = 0.2 * torch.randn(rank, weight.shape[1], generator=generator)
            b = 0.2 * torch.randn(len(weight), rank, generator=generator)
            key = f"base_model.model.{name.removesuffix('weight')}"
            lora |= {f"{key}lora_A.weight": a, f"{key}lora_B.weight": b}
            weight += 1.5 * b @ a
    return lora, merged


def check_batch(engine, references, plain_tokens, prompts, requests, plain):
    """One batch of all adapters, twice: the text is that without drafts, each adapter's drafts are those of its
    reference, and "a" and "b" bring draft weights. `requests`, `plain`: adapter's name -> its request, with draft
    weights and without."""
    checked = []

    def check(request) -> None:
        name = request.lora.name if request.lora else None
        if len(request.drafts.token_ids):
            checked.append((name, len(request.drafts.token_ids)))
            references[name].check_greedy(request.tokens, request.drafts.token_ids)

    jobs, expected = (
        [(prompt, GREEDY, lora(name)) for prompt, name in zip(prompts, ADAPTERS, strict=True)]
        for lora in (requests, plain)
    )
    for _ in range(2):
        assert serve(engine, jobs, check) == plain_tokens(expected)
    assert {name for name, _ in checked} == {None, "a", "b", "c"}
    assert {info.name: info.draft for info in engine.adapters.list()} == {"a": "loaded", "b": "loaded", "c": ""}
    return checked


def check_draft_weights(models, head, method, engine, plain_tokens, prompts, folder: Path):
    """Adapters with a LoRA for the head, and one without. Returns the heads with them merged, by adapter."""
    from peft import PeftModel
    from safetensors.torch import save_file

    merged, requests = {None: head}, {None: None}
    for name, rank in (("a", 2), ("b", 4), ("c", 0)):
        adapter = shutil.copytree(models.adapters[name], folder / name, ignore=shutil.ignore_patterns("draft"))
        merged[name] = copy.deepcopy(head)
        if rank:
            lora, merged[name] = lora_for(head, rank)
            nested = adapter / "draft" / method
            nested.mkdir(parents=True)
            save_file(lora, nested / "adapter_model.safetensors")
            settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 1.5 * rank}
            (nested / "adapter_config.json").write_text(json.dumps(settings))
        tuned = PeftModel.from_pretrained(models.reference(), models.adapters[name]).merge_and_unload()
        merged[name].target = ReferenceTarget(tuned)
        requests[name] = LoRARequest(name, path=str(adapter))
    check_batch(engine, merged, plain_tokens, prompts, requests.get, models.lora)
    return merged
