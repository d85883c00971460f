"""Heads that read the hidden states of a model with recurrent state change no text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ..tiny_families import FAMILIES
from .conftest import VOCAB
from .test_families import Served, start_engine


@pytest.fixture(scope="module", params=["lfm2", "qwen3.5", "kimi-linear", "mamba2"])
def served(request, tmp_path_factory) -> Served:
    family = FAMILIES[request.param]
    family = replace(family, config={**family.config, "vocab_size": VOCAB})
    return Served(tmp_path_factory.mktemp(request.param), family)


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_drafts_of_heads(models, make_engine, run, served, method):
    """The heads are another model's, of the same sizes: they are mostly wrong, so states are mostly rolled back."""
    few = {"block_size": 16, "num_gpu_blocks_override": 20, "max_num_batched_tokens": 64}
    engine = start_engine(make_engine, served, speculative_config=models.speculative(method, 3), **few)
    served.check(run(engine, served.jobs))
    again = run(engine, served.jobs)
    served.check(again)
    assert max(outcome.num_cached_tokens for outcome in again) >= 32
    counts = [entry.counts for entry in engine.stats().speculation]
    assert sum(count.num_draft_tokens for count in counts) > 0
    assert engine.stats().num_preemptions > 0
