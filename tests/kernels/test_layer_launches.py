"""Launches of a decoder layer on a GPU, counted without one: kernels of Triton, and torch's operations that write."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpretedFunction

from outrider.kernels import act_and_mul, rms_norm
from outrider.kernels import linear as linear_products
from outrider.kernels.linear import device_few
from outrider.kernels.linear import torch as linear
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
from outrider.models.rope_config import RopeConfig

from .call_tape import _Recorder, without_native_kernels

ROWS, BLOCK = 64, 16
BASE = Counter({"linear": 4, "_rms_norm_kernel": 2, "_act_and_mul_kernel": 1, "attention_kernel": 1})
"""Launches of a layer without adapters."""
ADAPTERS = Counter({"shrink_kernel": 4, "expand_kernel": 4})
"""Launches that adapters add, however many there are: two for each of qkv, o, gate_up and down."""
FEW = Counter({"few_rows_kernel": 4, "attention_kernel": 1})
"""Launches of a layer without adapters in a step of few tokens."""
FEW_ADAPTERS = Counter({"shrink_kernel": 4})
"""Launches that adapters add to it."""
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Launches:
    """Counts the launches of decoders; no kernel of Triton runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._kernels: Counter[str] = Counter()

        def launch(kernel: InterpretedFunction, *args: object, **options: object) -> None:
            self._kernels[kernel.fn.__name__] += 1

        monkeypatch.setattr(InterpretedFunction, "run", launch)

    def of_layer(self, num_adapters: int, rows: int = ROWS, starts: int = 20) -> Counter[str]:
        """Launches of one layer more, in a step of decodes that are divided among the adapters."""
        few, many = (self._of_model(layers, num_adapters, rows, starts) for layers in (1, 2))
        return many - few

    @torch.inference_mode()
    def _of_model(self, num_layers: int, num_adapters: int, rows: int, start: int) -> Counter[str]:
        model = decoder.Decoder(_config(num_layers))
        for slot in model.weight_slots().values():
            slot.load(torch.zeros(slot.shape))
        batch = None
        if num_adapters:
            sites, pool = AdapterSites(model.linears(), None, torch.float32, model.device), RowPool(128, 8)
            sites.allocate(128)
            for index in range(num_adapters):
                shapes = {name: shape for name, shape in sites.model.shapes.items() if name.endswith(TARGETS)}
                weights = {
                    name: LoraWeights(torch.zeros(1, shape.in_features), torch.zeros(1, shape.out_features), None)
                    for name, shape in shapes.items()
                }
                sites.write(pool.allocate(bytes([index]), 1), sites.model.layout.pack(weights))
            owners = [pool.allocation(bytes([row * num_adapters // rows])) for row in range(rows)]
            batch = LoraBatcher(torch.float32, model.device).build([(owner, 1) for owner in owners])
        blocks = start // BLOCK + 1
        kv = allocate_kv(model.kv_layers, blocks * rows, BLOCK, torch.float32, "cpu")
        tables = [list(range(blocks * row, blocks * (row + 1))) for row in range(rows)]
        step = build_batch(SequenceRows([0] * rows, [1] * rows, [start] * rows, tables), model, kv, batch)
        self._kernels.clear()
        recorder = _Named()
        with recorder:
            model.forward(step)
        return self._kernels + recorder.names


class _Named(_Recorder):
    """Counts the operations that a call tape would replay."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        before = len(self.calls)
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.calls) > before:
            self.names[func._schema.name.removeprefix("aten::")] += 1
        return made


def _config(num_layers: int) -> DecoderConfig:
    return DecoderConfig(
        **{"architecture": "LlamaForCausalLM", "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48},
        **{"num_layers": num_layers, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16},
        **{"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "qk_norm": False},
        **{"rope": RopeConfig(rope_type="default", theta=1e4), "windows": (None,) * num_layers},
        **{"qkv_bias": False, "o_bias": False, "mlp_bias": False},
        dtype=torch.float32,
    )


@pytest.fixture
def launches(device: str, monkeypatch: pytest.MonkeyPatch) -> Launches:
    if device == "cuda":
        pytest.skip("counted without a GPU")
    for module in (arena, batching, vectors):
        monkeypatch.setattr(module, "is_grouped", lambda dtype, device: True)
    for module in (act_and_mul, rms_norm):
        monkeypatch.setattr(module, "use_triton", lambda x: True)
    monkeypatch.setattr(decoder, "adds_residuals", lambda device: True)
    monkeypatch.setattr(grouped, "make_attention", lambda spec, *, batch_invariant: TritonAttention(spec))
    monkeypatch.setattr(linear, "_prepacks", lambda weight: False)
    monkeypatch.setattr(linear_products, "use_triton", lambda x: True)
    monkeypatch.setattr(device_few, "tried_rows", lambda weight: 16)
    without_native_kernels(monkeypatch)
    return Launches(monkeypatch)


@pytest.mark.parametrize("num_adapters", [0, 1, 64])
def test_a_layer_of_decodes(num_adapters: int, launches: Launches) -> None:
    assert launches.of_layer(num_adapters) == BASE + (ADAPTERS if num_adapters else Counter())


@pytest.mark.parametrize("start", [20, 1000])
@pytest.mark.parametrize(("rows", "num_adapters"), [(1, 0), (1, 1), (16, 0), (16, 1), (16, 16)])
def test_a_layer_of_few_decodes(rows: int, num_adapters: int, start: int, launches: Launches) -> None:
    counted = launches.of_layer(num_adapters, rows, start)
    assert counted == FEW + (FEW_ADAPTERS if num_adapters else Counter())
    assert counted.total() <= (10 if num_adapters else 6)


def test_a_layer_with_the_librarys_products(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a trial finds these faster, or their weights are too few tokens' worth, the layer is as with many tokens."""
    monkeypatch.setattr(device_few, "tried_rows", lambda weight: 4)
    assert launches.of_layer(0, 5) == BASE
    assert launches.of_layer(1, 5) == BASE + ADAPTERS
    assert launches.of_layer(1, 4) == FEW + FEW_ADAPTERS


def test_a_layer_with_one_product_of_the_librarys(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others of its products save the launch of the expand, and nothing else."""
    monkeypatch.setattr(device_few, "tried_rows", lambda weight: 16 if weight.shape[1] == 48 else 0)  # down
    expected = BASE + ADAPTERS - Counter({"linear": 1, "expand_kernel": 1}) + Counter({"few_rows_kernel": 1})
    assert launches.of_layer(1, 3) == expected
