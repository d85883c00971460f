"""Adapter kinds with the demo: AdaLoRA that computes what a LoRA adapter does, in batches with other kinds."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from outrider import LLM, LoRARequest, SamplingParams
from outrider.models.demo import demo_adapters, demo_model_path
from outrider.platform.core.errors import AdapterError

PROMPT = "List all customers"
PARAMS = SamplingParams(temperature=0, max_tokens=24)
INIT_R = 12


def demo_files(name):
    folder = Path(demo_adapters()[name])
    config = json.loads((folder / "adapter_config.json").read_text())
    return config, safetensors.torch.load_file(folder / "adapter_model.safetensors")


def adalora_of(name):
    """(configuration, tensors) of an AdaLoRA adapter equal to a demo's LoRA adapter, after its ranks were pruned."""
    config, state = demo_files(name)
    rank, masks = config["r"], {}
    scale = config["lora_alpha"] / rank
    for key in [key for key in state if key.endswith(".lora_A.weight")]:
        module = key.removesuffix(".lora_A.weight")
        state[f"{module}.lora_A"] = state.pop(key) / 2
        state[f"{module}.lora_B"] = state.pop(f"{module}.lora_B.weight")
        state[f"{module}.lora_E"] = torch.full((rank, 1), 2.0)
        masks[f"{module.removeprefix('base_model.model.')}.lora_E"] = [row < rank for row in range(INIT_R)]
    own = {"init_r": INIT_R, "lora_alpha": scale * (INIT_R + 1e-5), "rank_pattern": masks, "total_step": 10}
    return config | own | {"peft_type": "ADALORA"}, state


def dora_of(name):
    """(configuration, tensors) of a demo's LoRA adapter with magnitudes."""
    config, state = demo_files(name)
    base = safetensors.torch.load_file(demo_model_path() / "model.safetensors")
    for key in [key for key in state if key.endswith(".lora_A.weight")]:
        module = key.removesuffix(".lora_A.weight")
        weight = base[f"{module.removeprefix('base_model.model.')}.weight"].float()
        state[f"{module}.lora_magnitude_vector"] = 1.05 * weight.norm(dim=1)
    return config | {"use_dora": True}, state


def save(folder, files):
    folder.mkdir()
    config, state = files
    (folder / "adapter_config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(state, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    root = tmp_path_factory.mktemp("kinds")
    files = {"lora": demo_files("sql"), "adalora": adalora_of("sql"), "dora": dora_of("support")}
    return [LoRARequest(name, path=save(root / name, made)) for name, made in files.items()]


def answers(llm, adapters):
    outputs = llm.generate([PROMPT] * len(adapters), PARAMS, adapters, use_tqdm=False)
    return [(output.outputs[0].text, output.metrics.adapter_digest) for output in outputs]


def test_a_mixed_batch_has_the_same_text_with_and_without_speculation(adapters):
    requests = [None, *adapters]
    with LLM(speculative_config=None) as llm:
        plain = answers(llm, requests)
    with LLM(speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as llm:
        assert answers(llm, requests) == plain
        assert [answers(llm, [one])[0] for one in requests] == plain
        config, state = adalora_of("sql")
        llm.load_lora_adapter("policy", tensors=state, peft_config=config)
        assert answers(llm, ["policy"]) == [plain[2]]
        with pytest.raises(AdapterError, match=r"rank_pattern=.* is not served"):
            llm.load_lora_adapter("broken", tensors=state, peft_config=config | {"rank_pattern": {"q_proj": 3}})
    base, lora, adalora, dora = plain
    assert adalora == lora
    assert len({base, adalora, dora}) == 3
