"""Adapters and drafters that cannot fit: refused from config.json and headers, before any weights are read."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM
from outrider.models.demo import demo_adapters, demo_draft_path, demo_eagle3_path, demo_model_path
from outrider.platform.client.adapters.start_check import check_fits
from outrider.platform.core.adapter_files import AdapterFolder
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import AdapterError, InvalidRequestError
from outrider.platform.http.adapters.start_adapters import check_adapters
from outrider.platform.http.server_config import ServerConfig

DRAFTERS = {"eagle3": demo_eagle3_path, "draft_model": demo_draft_path}


@pytest.fixture
def adapter(tmp_path):
    return shutil.copytree(demo_adapters()["sql"], tmp_path / "sql")


def check(folder, max_rank=64):
    check_fits(AdapterFolder(str(folder)), demo_model_path(), max_rank)


def change(folder, rename):
    state = load_file(folder / "adapter_model.safetensors")
    save_file(dict(rename(key, tensor) for key, tensor in state.items()), folder / "adapter_model.safetensors")


@pytest.mark.parametrize("name", demo_adapters())
def test_a_fitting_adapter_passes(name):
    check(demo_adapters()[name])


def test_layers_that_the_model_lacks(adapter):
    change(adapter, lambda key, tensor: (key.replace("layers.1.", "layers.77."), tensor))
    with pytest.raises(
        AdapterError, match=r"layers\.77\..* of layer 77; the served model has \d+ layers, and \d+ more"
    ):
        check(adapter)


def test_another_hidden_size(adapter):
    change(adapter, lambda key, tensor: (key, torch.zeros(len(tensor), 7) if "q_proj.lora_A" in key else tensor))
    with pytest.raises(AdapterError, match=r"q_proj.lora_A.* is \[\d+, 7\]; the served model has the hidden size"):
        check(adapter)


def test_a_rank_above_the_limit(adapter):
    with pytest.raises(AdapterError, match="exceeds the limit max_lora_rank=2"):
        check(adapter, 2)


def test_the_server_names_the_adapter(adapter):
    config = ServerConfig(lora_modules={"mine": str(adapter)})
    check_adapters(EngineArgs(enable_lora=True), config)
    with pytest.raises(AdapterError, match=r"^mine=.*: rank") as caught:
        check_adapters(EngineArgs(enable_lora=True, max_lora_rank=2), config)
    assert caught.value.param == "lora_modules"


@pytest.mark.parametrize(
    ("method", "field", "said"),
    [("eagle3", "target_hidden_size", "hidden"), ("eagle3", "vocab_size", "vocabulary"),
     ("draft_model", "vocab_size", "vocabulary")],
)  # fmt: skip
def test_drafters_are_compared_before_weights_are_read(tmp_path, method, field, said):
    """The target has no weights: an error about these would come after the drafter's."""
    target = shutil.copytree(demo_model_path(), tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors"))
    drafter = shutil.copytree(
        DRAFTERS[method](), tmp_path / "drafter", ignore=shutil.ignore_patterns("*.safetensors", "tokenizer.json")
    )
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {field: 64}))
    with pytest.raises(InvalidRequestError, match=said) as caught:
        LLM(str(target), speculative_config={"method": method, "model": str(drafter)})
    assert caught.value.param == "speculative_config"
