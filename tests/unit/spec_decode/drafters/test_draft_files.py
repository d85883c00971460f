"""Files of drafters: those fetched by hub id (pickles are of heads, and of targets that have nothing else), and the
number of drafts that they name."""

import json

import huggingface_hub
import pytest

from outrider.models.checkpoint.paths import resolve_model_path
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.engine.engine_core import EngineCore


@pytest.mark.parametrize(
    ("draft", "stored", "pickles"),
    [
        (True, None, {"*.bin", "*.pt"}),
        (False, "model.safetensors", set()),
        (False, "pytorch_model.bin", {"pytorch_model*.bin"}),
    ],
)
def test_files_fetched_from_the_hub(monkeypatch, tmp_path, draft, stored, pickles):
    asked = set()

    def snapshot_download(name, allow_patterns, **options):
        assert name == "someone/model"
        asked.update(allow_patterns)
        return str(tmp_path)

    if stored is not None:
        (tmp_path / stored).touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model_path("someone/model", draft=draft) == tmp_path
    assert {"*.json", "*.safetensors"} <= asked
    assert {pattern for pattern in asked if pattern.endswith((".bin", ".pt"))} == pickles


@pytest.fixture
def describe(target, make_head, tmp_path):
    """Description of an engine's speculation with a head in the speculators format, which names 3 drafts."""

    def describe(named=3, **config):
        path = make_head("eagle3", speculators=True, own_head=True).save(tmp_path / "head")
        values = json.loads((path / "config.json").read_text())
        values["speculators_config"]["proposal_methods"] = [{"proposal_type": "greedy", "speculative_tokens": named}]
        (path / "config.json").write_text(json.dumps(values))
        speculation = {"method": "eagle3", "model": str(path), **config}
        args = EngineArgs(model=str(target.path), dtype="float32", max_model_len=64, speculative_config=speculation)
        engine = EngineCore(args)
        engine.shutdown()
        return engine.info.speculation

    return describe


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({}, "at most 3"),
        ({"adaptive": False}, "3"),
        ({"num_speculative_tokens": 2}, "2"),
        ({"named": 99}, "at most 32"),
        ({"named": None}, "at most 4"),
    ],
)
def test_the_default_number_of_drafts_is_the_one_in_the_files(describe, options, number):
    assert describe(**options) == f"eagle3, {number} drafts a step"


def test_a_number_of_drafts_that_is_none_is_refused(describe):
    with pytest.raises(InvalidRequestError, match="speculative_tokens must be a positive integer, got '3'"):
        describe(named="3")
