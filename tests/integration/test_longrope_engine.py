"""Engine of a LongRoPE model: greedy text is that of transformers, and no cached key serves the other rotation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider import SamplingParams

ORIGINAL = 40
SCALING = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 6.0],
}


@pytest.fixture(scope="module")
def folder(models, tmp_path_factory) -> Path:
    """The target with another rotation."""
    path = tmp_path_factory.mktemp("longrope")
    model = AutoModelForCausalLM.from_pretrained(models.target, dtype=torch.float32)
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "rope_parameters": SCALING}))
    return path


@pytest.fixture(scope="module")
def texts():
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 160, (90,), generator=generator).tolist()
    # One prompt continues another, and all share their first blocks: within the original context, at its end, beyond.
    return [tokens[:n] for n in (20, 36, ORIGINAL, ORIGINAL + 1, 90)] + [[5, 6, 7, 8] * 9, [5, 6, 7, 8] * 14]


@pytest.fixture(scope="module")
def wanted(folder, texts):
    """Greedy tokens of transformers after each text."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def continued(text: list[int]) -> list[int]:
        ids = torch.tensor([text])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": False}
        return model.generate(ids, **options)[0, len(text) :].tolist()

    return [continued(text) for text in texts]


@pytest.mark.parametrize("method", [None, "ngram", "draft_model"])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 24}])
def test_text_is_that_of_transformers(models, folder, wanted, texts, make_engine, run, method, options):
    engine = make_engine(model=str(folder), block_size=8, speculative_config=models.speculative(method, 3), **options)
    jobs = [(text, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)) for text in texts]
    for _ in range(2):  # again, from the prefix cache
        outcomes = run(engine, jobs)
        assert [outcome.token_ids for outcome in outcomes] == wanted
    assert min(outcome.num_cached_tokens for outcome in outcomes) > 0


def test_longrope_prefix_blocks_are_separate_for_long_prompts(folder, texts, make_engine, run):
    engine = make_engine(model=str(folder), block_size=8)
    params = SamplingParams(temperature=0, max_tokens=1)
    for text, cached in ((texts[1], 0), (texts[2], 32), (texts[4], 0), (texts[3], 40)):
        (outcome,) = run(engine, [(text, params)])
        assert outcome.num_cached_tokens == cached
