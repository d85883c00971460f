"""Models with recurrent state: random compositions of features give the greedy text of transformers and of PEFT.

Each seed is an engine with options at random (blocks, chunks, drafter, swap, overlap, bounds of the prefix cache) and
requests at random (shared prefixes, adapters, salts, groups), of which some are aborted and one step may fail.
`OUTRIDER_TEST_STATE_SEEDS` is a factor of the number of seeds.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from outrider import LoRARequest, SamplingParams
from outrider.models.checkpoint.loader import read_facts
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.messages import EngineRequest
from outrider.platform.core.state_size import ring_size
from outrider.platform.engine.engine_core import EngineCore

from ..prediction_checkpoints import LAYOUTS, Checkpoint
from ..thread_ranks import ranks_as_threads
from ..tiny_families import FAMILIES, SIZES, build

FACTOR = int(os.environ.get("OUTRIDER_TEST_STATE_SEEDS", "1"))
SEEDS = {"lfm2": 2, "qwen3.5": 1, "qwen3-next": 1, "kimi-linear": 1, "falcon-h1": 1, "mamba2": 1}
"""Seeds of each family, each with 60 requests or more; the last two are slow."""
DIVIDED = {"qwen3.5": 1}
"""Seeds of models that two ranks compute."""
MTP_SEEDS = {"qwen3.5": 1, "nemotron-h": 1}
"""Seeds of engines that draft with the target's head."""
TIE = 5e-3
"""Logits that differ by less may change their order: sums are made in another order than transformers' and PEFT's."""


class Reference:
    """A tiny model with two adapters, a small Llama that drafts for it, and maybe a head for multi-token prediction."""

    def __init__(self, root: Path, name: str) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM

        family = FAMILIES[name]
        self.head = Checkpoint(root / "head", LAYOUTS[name]).folder if name in LAYOUTS else None
        self.folder, self.draft = str(root / "base"), str(root / "draft")
        base = build(family)
        base.save_pretrained(self.folder)
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(self.draft)
        self.facts = read_facts(self.folder)
        self.adapters = {}
        for index, adapter in enumerate("ab"):
            torch.manual_seed(index)
            targets = [target for target in family.targets if target not in ("embed_tokens", "embeddings")]
            lora = LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, target_modules=targets)
            if index:
                self.tuned.add_adapter(adapter, lora)
            else:
                self.tuned = get_peft_model(base, lora, adapter_name=adapter).eval()
        self.tuned.save_pretrained(str(root))
        for adapter in "ab":
            self.adapters[adapter] = str(root / adapter)

    @torch.inference_mode()
    def check(self, adapter: str | None, texts: list[tuple[list[int], list[int]]]) -> None:
        """Each (prompt, output) must be greedy; the later tokens of a batch change nothing before them."""
        longest = max(len(prompt) + len(output) for prompt, output in texts)
        tokens = torch.tensor([[*p, *o, *[0] * (longest - len(p) - len(o))] for p, o in texts])
        if adapter is None:
            with self.tuned.disable_adapter():
                logits = self.tuned(tokens).logits
        else:
            self.tuned.set_adapter(adapter)
            logits = self.tuned(tokens).logits
        for of_row, (prompt, output) in zip(logits, texts, strict=True):
            rows = of_row[len(prompt) - 1 : len(prompt) + len(output) - 1]
            chosen = rows.gather(1, torch.tensor(output)[:, None])[:, 0]
            wrong = (rows.max(1).values - chosen > TIE).nonzero()
            assert not len(wrong), f"token {int(wrong[0])} of {len(output)} after {len(prompt)} is wrong"


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Products this small are slower with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """references(family) -> its models, made once."""
    return cache(lambda name: Reference(tmp_path_factory.mktemp(name), name))


def options(rng: random.Random, reference: Reference, method: str | None = "any") -> dict:
    """Options of an engine; its memory has room for few states of the prefix cache. `method`: its drafter."""
    if method == "any":
        method = rng.choice([None, "ngram", "suffix", "suffix", "draft_model"])
    speculative, k = None, 0
    if method is not None:
        k = rng.randint(1, 5)
        speculative = {"method": method, "num_speculative_tokens": k}
        if method == "draft_model":
            speculative["model"] = reference.draft
        if method == "mtp":
            speculative["model"] = str(reference.head)
        if rng.random() < 0.3:
            speculative["adaptive"] = True
    seats, block_size = rng.randint(2, 6), rng.choice([2, 4, 8, 16])
    rings = (seats + 1) * ring_size(k) * reference.facts.state_bytes
    blocks = -(-128 // block_size)
    return {
        "model": reference.folder,
        "max_model_len": 128,
        "max_num_seqs": seats,
        "block_size": block_size,
        "max_num_batched_tokens": rng.choice([16, 24, 48, 256]),
        "num_gpu_blocks_override": rng.choice([blocks, blocks + blocks // 2, blocks * seats]),
        "kv_cache_memory_bytes": int(rings * rng.choice([1.01, 2.0, 6.0])),
        "enable_prefix_caching": rng.random() < 0.8,
        "async_scheduling": rng.random() < 0.4,
        "speculative_config": speculative,
        "enable_lora": True,
        "max_lora_rank": 8,
        **rng.choice([{}, {"swap_space": 0.001}, {"swap_space": 0.01, "preemption_mode": "swap"}]),
    }


def requests(rng: random.Random, reference: Reference, count: int) -> list[EngineRequest]:
    """Requests with common prefixes, of several tenants and adapters."""
    stems = [[rng.randrange(3, 131) for _ in range(rng.randint(1, 80))] for _ in range(3)]
    stems.append([5, 6, 7] * 12)
    made: list[EngineRequest] = []
    for index in range(count):
        stem = rng.choice(stems)
        prompt = stem[: rng.randint(1, len(stem))] + [rng.randrange(3, 131) for _ in range(rng.randint(0, 9))]
        adapter = rng.choice([None, None, "a", "b"])
        lora = None if adapter is None else LoRARequest(adapter, path=reference.adapters[adapter])
        params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 36), ignore_eos=True)
        fields = {"tenant": rng.choice(["", "x"]), "cache_salt": rng.choice(["", "", "salt"])}
        group = f"group {index}" if rng.random() < 0.1 else None
        for sibling in range(2 if group else 1):
            name = f"{index}.{sibling}"
            made.append(EngineRequest(name, prompt, params, [1], lora=lora, group=group, **fields))
    return made


def serve(
    engine: EngineCore, rng: random.Random, jobs: list[EngineRequest], *, fails: bool = True
) -> dict[str, list[int]]:
    """Outputs of the requests that were not aborted; they arrive while others run. A step may fail, if `fails`."""
    outputs: dict[str, list[int]] = {}
    waiting, failing = list(jobs), rng.choice([None, None, rng.randint(0, 40)])
    computes, aborted = engine.model.forward, set()
    for step in range(4000):
        for _ in range(rng.randint(0, 3)):
            if waiting:
                request = waiting.pop(0)
                outputs[request.request_id] = []
                engine.add_request(request)
        if rng.random() < 0.02 and outputs:
            victim = rng.choice(list(outputs))
            aborted.add(victim)
            engine.abort([victim])
        if fails and step == failing:
            engine.model.forward = _fail
        try:
            for delta in engine.step():
                assert delta.error is None, delta.error
                outputs[delta.request_id] += delta.token_ids
        except ZeroDivisionError:
            pass
        engine.model.forward = computes
        if step % 8 == 0:
            engine.check_integrity()
        if not waiting and not engine.has_work():
            break
    assert not engine.has_work(), "did not finish"
    engine.check_integrity()
    return {name: output for name, output in outputs.items() if name not in aborted}


def _fail(*args, **named):
    raise ZeroDivisionError


@pytest.mark.parametrize(("family", "seed"), [(name, seed) for name, n in SEEDS.items() for seed in range(n * FACTOR)])
def test_random_compositions(references, family: str, seed: int) -> None:
    compose(references(family), seed)


@pytest.mark.parametrize(
    ("family", "seed"), [(name, seed) for name, n in MTP_SEEDS.items() for seed in range(n * FACTOR)]
)
def test_random_compositions_with_the_targets_head(references, family: str, seed: int) -> None:
    assert compose(references(family), seed, "mtp") > 0


@pytest.mark.parametrize(
    ("family", "seed"), [(name, seed) for name, n in DIVIDED.items() for seed in range(n * FACTOR)]
)
def test_random_compositions_on_two_ranks(references, family: str, seed: int, monkeypatch) -> None:
    """A step that fails ends an engine of several ranks, so none does."""
    ranks_as_threads(monkeypatch)
    compose(references(family), seed, num_ranks=2)


def compose(reference: Reference, seed: int, method: str | None = "any", num_ranks: int = 1) -> int:
    """Serve the compositions of a seed, and compare texts with the reference; return the number of drafts."""
    rng = random.Random(seed)
    values = options(rng, reference, method)
    if num_ranks > 1:
        values |= {"tensor_parallel_size": num_ranks, "async_scheduling": False}
        values["kv_cache_memory_bytes"] //= num_ranks  # of one rank
    engine = EngineCore(EngineArgs(**values))
    serve_all = partial(serve, engine, rng, fails=num_ranks == 1)
    try:
        jobs = requests(rng, reference, 20)
        outputs = serve_all(jobs)
        longer = [[*job.prompt_token_ids, *outputs.get(job.request_id, [])][:90] for job in jobs]
        turns = [
            replace(job, request_id=f"turn {job.request_id}", prompt_token_ids=prompt)
            for job, prompt in zip(jobs, longer, strict=True)
        ]
        again = [replace(job, request_id=f"again {job.request_id}") for job in jobs]  # whose drafts are often right
        outputs |= serve_all(turns)
        outputs |= serve_all(again)
        num_drafts = sum(entry.counts.num_draft_tokens for entry in engine.stats().speculation)
    finally:
        engine.shutdown()
    texts: dict[str | None, list[tuple[list[int], list[int]]]] = {}
    for job in (*jobs, *turns, *again):
        if job.request_id in outputs:
            output, adapter = outputs[job.request_id], None if job.lora is None else job.lora.lora_name
            assert len(output) == min(job.params.max_tokens, 128 - len(job.prompt_token_ids))
            texts.setdefault(adapter, []).append((list(job.prompt_token_ids), output))
    for adapter, of_adapter in texts.items():
        reference.check(adapter, of_adapter)
    return num_drafts
