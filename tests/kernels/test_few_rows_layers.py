"""Layers of few tokens whose products take over norms, activation, residuals and adapters: the results of the CPU's own
path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from outrider.kernels import linear as linear_products
from outrider.kernels.linear import device_few
from outrider.kernels.linear import torch as linear
from outrider.kernels.quantized_linear import QuantizedWeight
from outrider.lora.device import arena, batching, vectors
from outrider.lora.device.batching import LoraBatcher
from outrider.lora.device.layout import LoraWeights
from outrider.lora.device.pool import RowPool
from outrider.lora.device.sites import AdapterSites
from outrider.models import decoder
from outrider.models.attention import grouped
from outrider.models.attention.triton import TritonAttention
from outrider.models.batch import SequenceRows, allocate_kv, build_batch
from outrider.models.config import DecoderConfig
from outrider.models.layers.linear import Linear
from outrider.models.pass_graphs import PassGraphs

from .test_graphs_engine import files, graphs, plain, run  # noqa: F401  (fixtures)
from .test_layer_launches import BLOCK, TARGETS, _config

LENGTHS = [1, 1, 3, 1]
"""Tokens of each row of a step: three decodes, and a verification of two drafts."""


class Calls:
    """Counts the fused products of few tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.norms = self.all = 0
        product = device_few.FewRowsLinear.__call__

        def call(linear: device_few.FewRowsLinear, x: Tensor, **options: object) -> Tensor:
            self.all += 1
            self.norms += options.get("norm") is not None
            return product(linear, x, **options)

        monkeypatch.setattr(device_few.FewRowsLinear, "__call__", call)


@pytest.fixture
def on_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Calls]:
    """The path of a GPU from here on, in Triton's interpreter."""
    if device == "cuda":
        pytest.skip("compared with the CPU")

    def use() -> Calls:
        for module in (arena, batching, vectors):
            monkeypatch.setattr(module, "is_grouped", lambda dtype, device: True)
        monkeypatch.setattr(decoder, "adds_residuals", lambda device: True)
        monkeypatch.setattr(grouped, "make_attention", lambda spec, *, batch_invariant: TritonAttention(spec))
        use_few_rows(monkeypatch)
        return Calls(monkeypatch)

    return use


def use_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our products for up to 16 tokens, as on a GPU when the trial prefers them."""
    monkeypatch.setattr(linear, "_prepacks", lambda weight: False)
    monkeypatch.setattr(linear_products, "is_native", lambda weight: False)
    monkeypatch.setattr(linear_products, "use_triton", lambda x: True)
    monkeypatch.setattr(device_few, "tried_rows", lambda weight: 16)


class Model:
    """A decoder of three layers with two adapters, and a step."""

    def __init__(self, config: DecoderConfig, *, gains: bool = False, quantized: str = "") -> None:
        torch.manual_seed(1)
        self.model = decoder.Decoder(config)
        for part in self.model.linears():
            if quantized and quantized in part.name:
                part.quantize = _to_int8
        for name, slot in sorted(self.model.weight_slots().items()):
            slot.load(torch.randn(slot.shape) * slot.scale + ("norm" in name))
        self.sites, self.pool = (
            AdapterSites(self.model.linears(), None, torch.float32, self.model.device),
            RowPool(64, 8),
        )
        self.sites.allocate(64)
        for key, rank in ((b"narrow", 3), (b"wide", 24)):
            weights = {
                name: LoraWeights(
                    torch.randn(rank, shape.in_features) * 0.3,
                    torch.randn(rank, shape.out_features) * 0.3,
                    torch.rand(shape.out_features) + 0.5 if gains and key == b"wide" else None,
                )
                for name, shape in sorted(self.sites.model.shapes.items())
                if name.endswith(TARGETS) and not (key == b"narrow" and name.endswith(("k_proj", "up_proj")))
            }
            self.sites.write(self.pool.allocate(key, rank), self.sites.model.layout.pack(weights))

    def run(self, owners: list[bytes | None], aux_layers: tuple[int, ...] = (0, 2, 3)) -> list[Tensor]:
        rows = [(self.pool.allocation(key) if key else None, count) for key, count in zip(owners, LENGTHS, strict=True)]
        adapters = LoraBatcher(torch.float32, self.model.device).build(rows)
        torch.manual_seed(2)
        kv = allocate_kv(self.model.kv_layers, 2 * len(LENGTHS), BLOCK, torch.float32, "cpu")
        for layer in kv:
            layer.k.normal_(), layer.v.normal_()
        tables = [[2 * row, 2 * row + 1] for row in range(len(LENGTHS))]
        tokens = torch.randint(32, (sum(LENGTHS),)).tolist()
        step = build_batch(SequenceRows(tokens, LENGTHS, [20, 3, 15, 0], tables), self.model, kv, adapters)
        hidden, entering = self.model.forward(step, aux_layers)
        return [hidden, *entering, *(layer.k for layer in kv)]


def _to_int8(weight: Tensor) -> QuantizedWeight:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    return QuantizedWeight(bits=8, codes=codes, scales=scales, group=weight.shape[1])


CONFIGS = {
    "llama": {},
    "qwen": {"qkv_bias": True, "qk_norm": True},
    "biases, gelu": {"o_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"},
}
MIXES: list[list[bytes | None]] = [[None] * 4, [b"wide"] * 4, [b"narrow", None, b"wide", b"narrow"]]


@pytest.mark.parametrize("mix", MIXES, ids=["base", "one", "several"])
@pytest.mark.parametrize("name", CONFIGS)
def test_layers(name: str, mix: list[bytes | None], on_gpu: Callable[[], Calls]) -> None:
    config = replace(_config(3), **CONFIGS[name])
    expected = Model(config).run(mix)
    calls = on_gpu()
    _compare(Model(config).run(mix), expected)
    assert (calls.norms, calls.all) == (6, 12)


def test_adapters_with_gains_take_the_other_path(on_gpu: Callable[[], Calls]) -> None:
    expected = Model(_config(3), gains=True).run(MIXES[2])
    calls = on_gpu()
    model = Model(_config(3), gains=True)
    _compare(model.run(MIXES[2]), expected)
    assert calls.all == 0
    model.run(MIXES[0])
    assert calls.all == 12


@pytest.mark.parametrize("quantized", ["layers.0.down", "layers.2.qkv"])
def test_layers_of_both_paths(quantized: str, on_gpu: Callable[[], Calls]) -> None:
    """A quantised projection in the first or in the last layer: its other products are of few tokens, too."""
    config = _config(3)
    expected = Model(config, quantized=quantized).run(MIXES[2])
    calls = on_gpu()
    _compare(Model(config, quantized=quantized).run(MIXES[2]), expected)
    assert (calls.norms, calls.all) == (4, 11)


def test_parts_and_experts_do_not_use_few_rows_products(on_gpu: Callable[[], Calls]) -> None:
    on_gpu()
    common = {"dtype": torch.float32, "device": torch.device("cpu")}
    usual, expert = Linear("a", [("a", 8)], 4, **common), Linear("b", [("b", 8)], 4, expert=True, **common)
    invariant = Linear("c", [("c", 8)], 4, batch_invariant=True, **common)
    wide = Linear("d", [(f"d{index}", 8) for index in range(4)], 4, **common)
    for part in (usual, expert, invariant, wide):
        for slot in part.weight_slots().values():
            slot.load(torch.zeros(slot.shape))
    assert usual.fuses(16, None)
    assert not usual.fuses(17, None)
    assert not usual.fuses(0, None)
    assert not any(part.fuses(1, None) for part in (expert, invariant, wide))


def test_text_in_graphs(
    files: dict[str, Path],  # noqa: F811
    graphs: PassGraphs,  # noqa: F811
    device: str,
    plain: Callable[[], list[list[int]]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replayed passes of more tokens than a step has, with adapters that change, drafts and steps of a prompt."""
    use_few_rows(monkeypatch)
    calls = Calls(monkeypatch)
    found, drafted = run(files, device, "eagle3", adapted=True)
    assert graphs.num_replayed >= 4
    assert calls.norms > 0
    monkeypatch.undo()
    assert found == plain()
    assert any(drafted.values())


def _compare(results: list[Tensor], expected: list[Tensor]) -> None:
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, atol=2e-4, rtol=2e-4)
