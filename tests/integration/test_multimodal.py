"""Engines of multimodal checkpoints, with adapters that were trained on the whole model: greedy text is that of
transformers and PEFT, with drafts and cached prefixes."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from outrider import LoRARequest

from ..family_records import record
from ..tiny_multimodal import MULTIMODAL
from .test_families import Served, check_chunks, start_engine


@pytest.fixture(scope="module")
def served(request, tmp_path_factory) -> Served:
    return Served(tmp_path_factory.mktemp(request.param), MULTIMODAL[request.param])


@pytest.mark.parametrize("served", MULTIMODAL, indirect=True)
def test_drafts_adapters_and_prefixes(make_engine, run, served, caplog):
    speculation = {"method": "ngram", "num_speculative_tokens": 4}
    with caplog.at_level(logging.WARNING):
        engine = start_engine(make_engine, served, speculative_config=speculation, max_num_batched_tokens=64)
        first = run(engine, served.jobs)
    errors = served.check(first)
    again = run(engine, served.jobs)
    served.check(again)
    assert max(outcome.num_cached_tokens for outcome in again) >= 32
    assert sum(sum(outcome.accepted) for outcome in first) > 0
    assert ("is served without its" in caplog.text) == any("vis" in key for key in _tensors(served))
    check_chunks(make_engine, run, served)
    record(served.architecture, "native", ["base", "LoRA", "speculation", "prefix cache", "chunks"], errors)


def _adapter(served: Served) -> Path:
    return Path(next(lora.path for *_, lora in served.jobs if lora))


def _tensors(served: Served) -> dict:
    return load_file(_adapter(served) / "adapter_model.safetensors")


def _renamed(served: Served, to: Path, change, **config) -> LoRARequest:
    """The adapter with other keys (a function returns None for those that are left out)."""
    shutil.copytree(_adapter(served), to)
    tensors = {change(key): tensor for key, tensor in _tensors(served).items()}
    tensors.pop(None, None)
    save_file(tensors, to / "adapter_model.safetensors")
    file = to / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return LoRARequest("other", path=str(to))


def _older(key: str) -> str:
    """Name as versions of transformers before 4.52 have it."""
    text = "base_model.model.model.language_model."
    return key.replace(text, "base_model.model.language_model.model.").replace(".model.vision", ".vision")


@pytest.mark.parametrize("served", ["gemma3"], indirect=True)
def test_keys_of_older_versions(make_engine, run, served, tmp_path):
    engine = start_engine(make_engine, served)
    expected = run(engine, served.jobs)
    lora = _renamed(served, tmp_path / "old", _older)
    assert any("model.language_model.model." in key for key in load_file(tmp_path / "old/adapter_model.safetensors"))
    jobs = [(*job, which and lora) for *job, which in served.jobs]
    assert [found.token_ids for found in run(engine, jobs)] == [found.token_ids for found in expected]


@pytest.mark.parametrize("served", ["gemma3"], indirect=True)
def test_a_trained_projector_is_left_out_and_an_adapter_of_a_tower_alone_refused(make_engine, run, served, tmp_path):
    def projector(key: str) -> str:
        place = "vision_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight"
        return key.replace(place, "multi_modal_projector.mm_input_projection_weight")

    engine = start_engine(make_engine, served)
    expected = run(engine, served.jobs)
    config = {"modules_to_save": ["multi_modal_projector"]}
    lora = _renamed(served, tmp_path / "projector", projector, **config)
    assert any("projector" in key for key in load_file(tmp_path / "projector/adapter_model.safetensors"))
    jobs = [(*job, which and lora) for *job, which in served.jobs]
    assert [found.token_ids for found in run(engine, jobs)] == [found.token_ids for found in expected]
    alone = _renamed(served, tmp_path / "alone", lambda key: key if "vision" in key else None)
    (refused,) = run(engine, [(*served.jobs[0][:2], alone)])
    assert re.match(r"all \d+ tensors are of a vision tower or its projector, such as .*k_proj", refused.error.message)
