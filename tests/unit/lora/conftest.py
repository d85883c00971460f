"""A tiny model's linears, PEFT folders made by hand, and requests."""

import json
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.lora.manager import LOADING, AdapterManager
from outrider.models.layers.linear import Linear
from outrider.platform.core.config import LoRAConfig
from outrider.platform.core.lora_request import LoRARequest
from outrider.platform.core.request import Request
from outrider.platform.core.sampling_params import SamplingParams

HIDDEN = 16
SIZES = {"q_proj": (HIDDEN, 16), "k_proj": (HIDDEN, 8), "v_proj": (HIDDEN, 8), "down_proj": (24, HIDDEN)}


def module(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{'mlp' if name == 'down_proj' else 'self_attn'}.{name}"


def make_linears(num_layers: int = 2) -> list[Linear]:
    linears = []
    for layer in range(num_layers):
        for name, parts in (("qkv", ("q_proj", "k_proj", "v_proj")), ("down", ("down_proj",))):
            slices = [(module(layer, part), SIZES[part][1]) for part in parts]
            linears.append(
                Linear(
                    f"layers.{layer}.{name}",
                    slices,
                    SIZES[parts[0]][0],
                    dtype=torch.float32,
                    device=torch.device("cpu"),
                )
            )
    return linears


def tensors(rank=4, *, seed=0, modules=tuple(SIZES), layers=(0, 1), prefix="base_model.model.", middle=""):
    """A PEFT state dict; keys are those of PEFT by default."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for layer in layers:
        for name in modules:
            in_features, out_features = SIZES[name]
            key = f"{prefix}{module(layer, name)}"
            state[f"{key}.lora_A{middle}.weight"] = torch.randn(rank, in_features, generator=generator)
            state[f"{key}.lora_B{middle}.weight"] = torch.randn(out_features, rank, generator=generator)
    return state


def vera_state(rank=4, *, seed=0, middle=""):
    """The state dict of a VeRA adapter on all modules, with PEFT's keys."""
    generator = torch.Generator().manual_seed(seed)
    widest_in, widest_out = (max(sizes) for sizes in zip(*SIZES.values(), strict=True))
    state = {
        f"base_model.vera_A{middle}": torch.randn(rank, widest_in, generator=generator),
        f"base_model.vera_B{middle}": torch.randn(widest_out, rank, generator=generator),
    }
    for layer in (0, 1):
        for name, (_, out_features) in SIZES.items():
            key = f"base_model.model.{module(layer, name)}.vera_lambda"
            state[f"{key}_d{middle}"] = torch.randn(rank, generator=generator)
            state[f"{key}_b{middle}"] = torch.randn(out_features, generator=generator)
    return state


def adalora_state(rank=4, *, seed=0, middle=""):
    """The state dict of an AdaLoRA adapter on all modules, with PEFT's keys."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for layer in (0, 1):
        for name, (in_features, out_features) in SIZES.items():
            key = f"base_model.model.{module(layer, name)}.lora"
            state[f"{key}_A{middle}"] = torch.randn(rank, in_features, generator=generator)
            state[f"{key}_B{middle}"] = torch.randn(out_features, rank, generator=generator)
            state[f"{key}_E{middle}"] = torch.randn(rank, 1, generator=generator)
    return state


# Of every kind but LoRA: its tensors, and fields that `write_adapter` does not write.
KIND_STATES = {"VERA": (vera_state, {}), "ADALORA": (adalora_state, {"init_r": 4})}


def write_adapter(folder: Path, state=None, *, rank=4, seed=0, binary=False, **config) -> str:
    """An adapter's folder; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    state = tensors(rank, seed=seed) if state is None else state
    if binary:
        torch.save(state, folder / "adapter_model.bin")
    else:
        save_file(state, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(SIZES), "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return str(folder)


_arrivals = count()


def make_request(name: str | None = None, path: str | None = None, request_id: str = "r", priority: int = 0) -> Request:
    """Queued after all those made before of the same priority."""
    lora = LoRARequest(name, path=path) if name is not None else None
    order = (priority, next(_arrivals))
    return Request(request_id, [1, 2, 3], 3, SamplingParams(), seed_key=0, lora=lora, order=order)


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    """Shapes are tiny here; a second thread would only be waited for when the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_manager():
    """Managers that are closed, and whose bookkeeping is checked, after the test."""
    made = []

    def make(max_loras=2, max_cpu_loras=4, max_lora_rank=8, memory_bytes=None, max_cpu_bytes=None, **options):
        config = LoRAConfig(
            max_loras=max_loras,
            max_cpu_loras=max_cpu_loras,
            max_lora_rank=max_lora_rank,
            memory_bytes=memory_bytes,
            max_cpu_bytes=max_cpu_bytes,
        )
        linears = make_linears()
        manager = AdapterManager(linears, config, torch.float32, "cpu", **options)
        manager.linears = linears
        made.append(manager)
        return manager

    yield make
    for manager in made:
        manager.check_integrity()
        manager.close()


@pytest.fixture
def folder(tmp_path):
    """Writes adapter `name` (rank 4 by default) and returns its path."""

    def write(name, rank=4, **options):
        return write_adapter(tmp_path / name, rank=rank, seed=options.pop("seed", sum(name.encode())), **options)

    return write


def settle(manager, request):
    """Why the request must wait after all reads and writes; None: it runs."""
    for _ in range(20):
        reason = manager.admit(request)
        if reason != LOADING:
            break
        manager.wait(10)
    return reason


def admitted(manager, name, path, request_id="r", **options):
    """A request that has been resolved and admitted, waiting for loads."""
    request = make_request(name, path, request_id, **options)
    manager.resolve(request)
    assert settle(manager, request) is None
    return request


def level(manager, name):
    return next(info.level for info in manager.catalog.list() if info.name == name)
