"""Models with recurrent state, or with layers of several shapes, on two ranks: greedy text is that of transformers and
of PEFT, with drafts, chunks, cached prefixes, preemption and swapping."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ..thread_ranks import ranks_as_threads
from ..tiny_families import FAMILIES
from .test_families import Served, start_engine

GROUPS = {"mamba2": {"n_groups": 2}}
"""Changes of sizes that two ranks do not divide."""
NAMES = ["lfm2", "qwen3.5", "qwen3-next", "kimi-linear", "falcon-h1", "mamba2", "gemma3n", "gemma4", "gemma4-experts"]
SPECULATION = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.fixture(scope="module", params=NAMES)
def served(request, tmp_path_factory) -> Served:
    family = FAMILIES[request.param]
    family = replace(family, config={**family.config, **GROUPS.get(request.param, {})})
    return Served(tmp_path_factory.mktemp(request.param), family)


def test_drafts_chunks_and_prefixes(make_engine, run, served, monkeypatch):
    ranks_as_threads(monkeypatch)
    options = {"tensor_parallel_size": 2, "speculative_config": SPECULATION, "max_num_batched_tokens": 64}
    engine = start_engine(make_engine, served, **options)
    first = run(engine, served.jobs)
    served.check(first)
    again = run(engine, served.jobs)
    served.check(again)
    assert max(outcome.num_cached_tokens for outcome in again) >= 32
    assert sum(sum(outcome.accepted) for outcome in first) > 0


def test_preemption(make_engine, run, served, monkeypatch):
    ranks_as_threads(monkeypatch)
    few = {"tensor_parallel_size": 2, "block_size": 16, "num_gpu_blocks_override": 14}
    engine = start_engine(make_engine, served, **few, swap_space=0.01, preemption_mode="swap")
    served.check(run(engine, served.jobs))
    assert engine.stats().num_preemptions > 0
    assert (engine.stats().kv_host_hits > 0) == bool(engine.model.kv_layers)


@pytest.mark.slow
def test_processes(make_engine, run, tmp_path):
    """Ranks that are processes of their own."""
    served = Served(tmp_path, FAMILIES["qwen3.5"])
    engine = start_engine(make_engine, served, tensor_parallel_size=2, speculative_config=SPECULATION)
    served.check(run(engine, served.jobs))
    engine.release_memory()
    served.check(run(engine, served.jobs))
