"""Weights that are quantised while they are loaded: errors, memory, and tables that are the head's rows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider.models.checkpoint.loader import ModelOptions, load_model
from outrider.models.quantization.rounding import ROUNDINGS
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.quantization import rounding

from ...quantized_files import CASES, write_quantized

# Largest error of a weight: half a step of its row, of its group, or of float8's three bits.
STEPS = {"int8": 1 / 254, "int4": 1 / 15, "fp8": 1 / 16}


@pytest.mark.parametrize("method", ROUNDINGS)
@pytest.mark.parametrize("inputs", [96, 128, 300])
def test_errors_are_those_of_a_step(method: str, inputs: int) -> None:
    weight = torch.randn(40, inputs)
    weight[3] = 0
    weight[4] = 0.5
    found = ROUNDINGS[method](weight.bfloat16())
    assert found.shape == (40, inputs)
    error = (found.dequantized() - weight.bfloat16().float()).abs()
    largest = weight.abs().amax(1, keepdim=True)
    assert float((error / largest.clamp(min=1e-9))[5:].max()) < 2 * STEPS[method] + 0.1 * (method == "int4")
    assert float(error[3:5].max()) < 1e-2
    relative = float(error.square().sum() / weight.square().sum()) ** 0.5
    assert relative < {"int8": 0.01, "int4": 0.12, "fp8": 0.04}[method]


@pytest.mark.parametrize("method", ROUNDINGS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_runs_on_rounded_weights(method: str, tied: bool, save_tiny: Callable, driver: Callable) -> None:
    folder, _ = save_tiny("Llama", tie_word_embeddings=tied)
    plain, rounded = (load_model(folder, "bfloat16", options=ModelOptions(quantization=m)) for m in (None, method))
    tokens = {0: [3, 1, 4, 1, 5, 9, 2, 6]}
    exact, found = (driver(model).forward_once(tokens)[0] for model in (plain, rounded))
    error = float((exact - found).square().mean() / exact.square().mean()) ** 0.5
    assert 0 < error < {"int8": 0.1, "int4": 0.6, "fp8": 0.2}[method]
    looked_up = rounded.embedding.lookup(torch.tensor([5, 130, 5]))
    expected = plain.embedding.lookup(torch.tensor([5, 130, 5]))
    torch.testing.assert_close(looked_up.float(), expected.float(), rtol=0, atol=float(expected.abs().max()) / 100)
    assert plain.embedding.is_table(plain.embedding.lookup(torch.arange(131)))
    assert rounded.embedding.num_bytes < plain.embedding.num_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_copies_of_rounded_tables_and_heads_are_known(dtype: str, tied: bool, save_tiny: Callable) -> None:
    """PEFT stores them with adapters on these modules."""
    folder, saved = save_tiny("Llama", tie_word_embeddings=tied)
    embedding = load_model(folder, dtype, options=ModelOptions(quantization="int8")).embedding
    table, head = saved.get_input_embeddings().weight.detach(), saved.get_output_embeddings().weight.detach()
    assert embedding.is_table(table)
    assert embedding.is_head(head)
    other = table.clone()
    other[7, 5] += 0.1 * table[7].abs().max()
    assert not embedding.is_table(other)
    assert not embedding.is_head(other)
    assert not embedding.is_head(head[1:])


@pytest.mark.parametrize("method", ROUNDINGS)
def test_the_router_of_experts_is_not_rounded(method: str, save_tiny: Callable) -> None:
    """Routers, and the gate of Qwen2-MoE's shared expert."""
    sizes = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    folder, _ = save_tiny("Qwen2Moe", **sizes, shared_expert_intermediate_size=32, hidden_size=64)
    inputs, kept = torch.eye(64).bfloat16(), set()
    plain, rounded = (load_model(folder, "bfloat16", options=ModelOptions(quantization=m)) for m in (None, method))
    for exact, found in zip(plain.linears(), rounded.linears(), strict=True):
        if exact.in_features == 64 and torch.equal(exact.project(inputs), found.project(inputs)):
            kept.add(exact.name.rsplit(".", 1)[-1])
    assert kept == {"router", "shared_gate"}


def test_groups_of_small_models_are_small(save_tiny: Callable) -> None:
    folder, _ = save_tiny("Llama", hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
    model = load_model(folder, "bfloat16", options=ModelOptions(quantization="int4"))
    plain = load_model(folder, "float32")
    for rounded, exact in zip(model.linears(), plain.linears(), strict=True):
        product = rounded.project(torch.eye(128).bfloat16()).float().T
        weight = exact.project(torch.eye(128)).T
        error = (product - weight).abs().unflatten(1, (-1, 32)).amax(2)
        values = weight.unflatten(1, (-1, 32))
        assert bool((error <= 0.1 * (values.amax(2) - values.amin(2))).all())


def test_the_option_fits_the_checkpoint() -> None:
    assert rounding(None, "gptq") is rounding("gptq", "gptq") is rounding("none", None) is None
    assert rounding("int4", None) == "int4"
    for asked, stored, words in (("int8", "gptq", "gptq"), ("awq", None, "int8, int4, fp8"), ("x", None, "'x'")):
        with pytest.raises(InvalidRequestError, match=words) as caught:
            rounding(asked, stored)
        assert caught.value.param == "quantization"


WORKSPACE = 56 << 20
"""Memory for the tensors at hand, which does not grow with the model."""
PEAK = """
import sys, threading, time
from pathlib import Path
from outrider.models.checkpoint.loader import ModelOptions, load_model
folder, method = sys.argv[1:]
load_model(sys.argv[1] + "/small", "bfloat16", options=ModelOptions(quantization=method or None))

def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10

before, peak, done = anonymous(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)
thread = threading.Thread(target=watch)
thread.start()
model = load_model(folder, "bfloat16", options=ModelOptions(quantization=method or None))
done = True
thread.join()
print(peak - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gptq", "int4"])
def test_loading_needs_little_more_than_the_weights(kind: str, save_tiny: Callable, tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3, "vocab_size": 8192}
    more = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
    source, _ = save_tiny("Llama", **sizes, **more, dtype=torch.bfloat16)
    folder, small = tmp_path, tmp_path / "small"
    tiny, _ = save_tiny("Llama", dtype=torch.bfloat16)
    if kind == "gptq":
        write_quantized(source, folder, CASES["gptq"])
        write_quantized(save_tiny("Llama", hidden_size=64, intermediate_size=96)[0], small, CASES["gptq"])
    else:
        folder.joinpath("small").symlink_to(tiny)
        for file in source.iterdir():
            folder.joinpath(file.name).symlink_to(file)
    stored = (folder / "model.safetensors").stat().st_size
    method = "" if kind == "gptq" else kind
    ran = subprocess.run([sys.executable, "-c", PEAK, str(folder), method], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 1.1 * stored + WORKSPACE
