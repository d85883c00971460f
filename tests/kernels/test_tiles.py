"""Products by AMX tiles, as they are compiled, and the choice between them and oneDNN's. If the processor has no
tiles a handler computes the instructions that it refuses (tile_trap.cpp); else the same tests run on the real ones."""

from __future__ import annotations

import ctypes
import json
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from outrider import SamplingParams
from outrider.kernels import native as building
from outrider.kernels.experts import native as experts_native
from outrider.kernels.experts.native import NativeExperts
from outrider.kernels.experts.torch import Routing
from outrider.kernels.linear import NativeLinear, pack, trial
from outrider.kernels.linear import native as linear_native
from outrider.kernels.linear.invariant import trial_operands
from outrider.kernels.lora.native import NativeRows, RowSegments
from outrider.kernels.memory import WeightMemory
from outrider.kernels.native import compiler, tiles
from outrider.kernels.native.tiles import NEVER, NOTHING, TileUse
from outrider.kernels.quantized_linear import native as quantized_native
from outrider.kernels.quantized_linear.native import NativeQuantizedLinear
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.messages import EngineRequest
from outrider.platform.engine.engine_core import EngineCore

from .test_linear_native import operands
from .test_quantized_native import make, make_inputs
from .tile_library import CAN_COMPUTE, COMPILER, EMULATES, compile_with_tiles

LLAMA = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 2},
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": 70, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
}

pytestmark = pytest.mark.skipif(not CAN_COMPUTE, reason="no g++, or a processor without AVX512-BF16")
emulated = pytest.mark.skipif(not EMULATES, reason="the processor computes the tiles itself, right and fast")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Kernels for a processor with tiles, which this process and its children find in the cache."""
    cache, others = tmp_path_factory.mktemp("cache"), building.library()

    class Library(ctypes.PyDLL):
        """The products with tiles; the other kernels are those of this processor."""

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(others, name)

    users = (experts_native, linear_native, quantized_native)
    clear = (tiles.prepare, trial._wins, *(module._functions for module in users))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("CXX", f"{COMPILER} -mamx-tile -mamx-bf16 -mamx-int8")
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        monkeypatch.delenv("OUTRIDER_AMX", raising=False)
        monkeypatch.setattr(compiler, "_compile", compile_with_tiles)
        path = compiler.build()
        library = Library(str(path))
        for module in (building, tiles):
            monkeypatch.setattr(module, "library", lambda: library)
        for function in clear:
            function.cache_clear()
        yield path
    for function in clear:
        function.cache_clear()


@pytest.fixture
def chosen(kernels):
    """All products use tiles."""
    assert tiles.are_granted()
    tiles.use(TileUse(True, 1))
    yield
    tiles.use(NOTHING)


@pytest.mark.parametrize("shape", [(1, 2), (70, 6), (64, 64), (129, 1066)], ids=str)
def test_products_of_bfloat16(chosen, shape):
    """Against float64: 2^-8 for the rounding of the result. A row has the same bits in any batch."""
    weight, x, bias, residual = operands(50, shape)
    linear = NativeLinear([weight], bias)
    y = linear(x, residual)
    dense = x.double() @ weight.double().T
    torch.testing.assert_close(y.double(), dense + bias.double() + residual.double(), rtol=2**-8, atol=1e-4)
    torch.testing.assert_close(linear.without_bias(x[:9]).double(), dense[:9], rtol=2**-8, atol=1e-4)
    for start, stop in [(0, 1), (3, 5), (0, 16), (7, 24), (17, 50)]:
        assert torch.equal(linear(x[start:stop], residual[start:stop]), y[start:stop])
    tiles.use(NOTHING)
    torch.testing.assert_close(linear(x, residual).double(), y.double(), rtol=2**-7, atol=1e-4)


def test_bits_of_tiles_are_their_own(chosen):
    """The sums have another order than without tiles: so tiles serve every number of rows, or none."""
    x, weight = trial_operands((16, 512), (64, 512), torch.Generator().manual_seed(0))
    linear, x = NativeLinear([weight.bfloat16()], None), x.bfloat16()
    with_tiles = linear(x)
    tiles.use(NOTHING)
    assert not torch.equal(linear(x), with_tiles)


def test_many_rows_and_what_is_not_finite(chosen):
    weight, x, _, _ = operands(210, (64, 34))
    x[2, 5], x[200, 33] = float("nan"), float("inf")
    y = NativeLinear([weight], None)(x)
    expected = x.double() @ weight.double().T
    assert torch.isnan(y[2]).all()
    assert not torch.isfinite(y[200]).any()
    others = [row for row in range(210) if row not in (2, 200)]
    torch.testing.assert_close(y[others].double(), expected[others], rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("is_quantized", [False, True])
def test_adapters_are_added_by_the_same_call(chosen, is_quantized):
    weight, x, bias, residual = operands(20, (130, 96))
    linear = NativeQuantizedLinear([make("int4", 130, 96, 32)], bias) if is_quantized else NativeLinear([weight], bias)
    arena = torch.randn(20, 96 + 130).mul_(0.2).bfloat16()
    rows = NativeRows(arena[:, :96].unsqueeze(1), arena[:, 96:], (130,), np.ones((20, 1), np.uint8, order="F"))
    step = RowSegments([(0, 3, range(1, 4)), (5, 20, range(8, 16))])
    expected = linear(x, residual)
    rows.add(expected, x, step)
    got = linear(x, residual, rows.address, step)
    assert torch.equal(got, expected)
    alone = linear(x[9:10], residual[9:10], rows.address, RowSegments([(0, 1, range(8, 16))]))
    assert torch.equal(alone[0], got[9])


@pytest.mark.parametrize("kind", ["int8", "w8a8", "int4 zero points", "int4 minimum", "iq4", "ordered"])
@pytest.mark.parametrize("group", [6, 32, 100, 999])
def test_products_of_integers_are_exact(chosen, kind, group):
    """The bits are those of the products without tiles, which are compared with float64 elsewhere."""
    linear, x = NativeQuantizedLinear([make(kind, 70, 333, group)], None), make_inputs(35, 333)
    x[3, 8] = float("inf")
    for rows in (1, 16, 35):
        tiles.use(TileUse(True, 1))
        y = linear(x[:rows])
        tiles.use(TileUse(True, NEVER))
        assert torch.equal(linear(x[:rows]).nan_to_num(), y.nan_to_num())


def test_experts(chosen):
    gate_up = [NativeLinear([torch.randn(64, 64).mul_(0.1).bfloat16()], None) for _ in range(3)]
    down = [NativeLinear([torch.randn(64, 32).mul_(0.1).bfloat16()], None) for _ in range(3)]
    x = torch.randn(40, 64).bfloat16()
    picked = torch.arange(80).remainder(3).view(40, 2)
    routing = Routing(picked.contiguous(), torch.full((40, 2), 0.5))
    experts = NativeExperts(gate_up, down)
    y = experts(x, routing)
    tiles.use(NOTHING)
    torch.testing.assert_close(experts(x, routing), y, rtol=2**-6, atol=1e-3)


class TestChoice:
    @pytest.fixture(autouse=True)
    def _forgotten(self, kernels):
        self.file = kernels.with_suffix(".tiles.json")
        self._forget()
        yield
        self._forget()
        tiles.use(NOTHING)

    def _forget(self):
        self.file.unlink(missing_ok=True)
        tiles.prepare.cache_clear()
        trial._wins.cache_clear()

    @pytest.fixture
    def right(self):
        """The check found all products right, and those of integers faster from 16 rows on."""
        self.file.write_text(json.dumps(TileUse(True, 16)._asdict()))

    @pytest.fixture
    def equal(self, monkeypatch):
        """All products take the same time: the emulation takes a thousand times as long."""
        monkeypatch.setattr(trial, "_seconds", lambda product, x: 1.0)

    @pytest.mark.parametrize(
        ("fault", "pairs", "wrong"),
        [
            ("", True, ""),
            pytest.param("wrong bytes", True, "integers are wrong on this processor", marks=emulated),
            pytest.param("wrong pairs", False, "bfloat16 are wrong on this processor", marks=emulated),
            pytest.param("crash", False, "their check failed (signal", marks=emulated),
        ],
    )
    def test_a_child_checks_the_instructions_first(self, monkeypatch, caplog, equal, fault, pairs, wrong):
        """Unasked. A wrong product is dropped with a warning and a line of the summary; a right one is taken."""
        monkeypatch.setenv("OUTRIDER_TILE_FAULT", fault)
        assert isinstance(pack(torch.zeros(64, 64).bfloat16()), NativeLinear) is pairs
        assert tiles.prepare().pairs is pairs
        assert tiles.prepare().byte_rows == NEVER or not EMULATES  # the emulation is slow
        assert caplog.text.count("AMX tiles: ") == bool(wrong)
        assert wrong in caplog.text
        assert wrong in tiles.describe()
        assert tiles.describe().startswith("bfloat16" if pairs else "not used: ")
        kept = json.loads(self.file.read_text())
        assert kept["pairs"] is pairs
        assert wrong in kept["fault"]

    def test_the_result_is_kept(self, right):
        assert tiles.prepare() == TileUse(True, 16)
        assert tiles.describe() == "bfloat16, integers from 16 rows on"

    @pytest.mark.parametrize(
        "content", ["", "[1]", '{"pairs": 3, "byte_rows": 1}', '{"pairs": true, "byte_rows": -1, "fault": ""}']
    )
    def test_a_damaged_file_is_made_again(self, monkeypatch, content):
        self.file.write_text(content)
        monkeypatch.setattr(tiles, "_check", lambda kept: TileUse(True, 7))
        assert tiles.prepare() == TileUse(True, 7)

    def test_the_check_in_a_child_process_times_out(self, monkeypatch, caplog):
        """Another start may have more of it, so the finding is not kept."""
        monkeypatch.setattr(tiles, "CHECK_SECONDS", 0.01)
        assert tiles.prepare()[:2] == NOTHING[:2]
        assert "not used: their check failed (timed out" in caplog.text
        assert not self.file.exists()

    @pytest.mark.parametrize(
        ("ends", "reason", "is_kept"),
        [
            ("echo first >&2; echo no module torch >&2; exit 3", "exit code 3: no module torch", False),
            ("kill -ILL $$", "signal 4", True),
            ("kill -ABRT $$", "signal 6", False),  # as of std::bad_alloc
            ("kill -KILL $$", "signal 9", False),  # as for memory
            ("kill -TERM $$", "signal 15", False),
            (None, "No such file", False),
        ],
    )
    def test_transient_failures_are_not_cached(self, monkeypatch, tmp_path, ends, reason, is_kept):
        child = tmp_path / "python"
        if ends is not None:
            child.write_text(f"#!/bin/sh\n{ends}\n")
            child.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(child))
        assert tiles.prepare()[:2] == NOTHING[:2]
        assert re.match(rf"not used: their check failed \((\[Errno 2\] )?{reason}", tiles.describe())
        assert self.file.exists() == is_kept

    @pytest.mark.parametrize(
        ("times", "wins"), [({}, True), ({1: 1.2}, False), ({128: 1.2}, False), ({1: 0.5, 128: 1.9}, True)]
    )
    def test_each_shape_is_tried(self, monkeypatch, right, times, wins):
        """The native product is used if it takes no longer over all numbers of rows; the result is kept."""
        asked = []

        def seconds(product, x):
            asked.append(len(x))
            return times.get(len(x), 1.0) if isinstance(product, NativeLinear) else 1.0

        monkeypatch.setattr(trial, "_seconds", seconds)
        for _ in range(2):
            assert isinstance(pack(torch.zeros(64, 32).bfloat16()), NativeLinear) == wins
        number = len(asked)
        trial._wins.cache_clear()
        assert trial.prefers_native(64, 32) == wins
        assert len(asked) == number
        assert trial.prefers_native(32, 64) == wins

    @emulated
    def test_slow_tiles_are_not_used(self, right):
        assert not trial.prefers_native(256, 256)  # the emulation takes a thousand times as long
        assert trial.prefers_native(256, 256, batch_invariant=True)

    def test_weights_of_a_trial_are_freed_with_it(self, monkeypatch, right):
        """They do not share chunks with the model's, which would keep their memory."""
        memory = WeightMemory()
        for module in (linear_native, trial):
            monkeypatch.setattr(module, "weight_memory", memory)
        with memory.of_model():
            before = memory.take(64)
            trial.prefers_native(64, 64)
            assert memory.take(64).data_ptr() == before.data_ptr() + 64

    def test_a_wrong_product_of_a_shape_is_not_used(self, monkeypatch, caplog, right, equal):
        right_product = NativeLinear.__call__
        monkeypatch.setattr(NativeLinear, "__call__", lambda linear, x: right_product(linear, x) + (len(x) > 8))
        assert not trial.prefers_native(70, 66)
        assert "wrong for 70x66" in caplog.text

    def test_processes_that_start_together_choose_alike(self, right):
        """The second one waits for the trial of the first, and has its result whatever it would have measured."""
        asked = []

        def tries(wins):
            def answer(*shape):
                asked.append(shape)
                entered.set()
                time.sleep(0.05)
                return wins

            return answer

        entered, found = threading.Event(), []
        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
            patch.setattr(trial, "_try", tries(False))
            first = pool.submit(trial.prefers_native, 64, 96)
            assert entered.wait(10)
            patch.setattr(trial, "_try", tries(True))
            found = [trial.prefers_native(64, 96), first.result()]
        assert found == [False, False]
        assert asked == [(64, 96)]

    def test_an_uncacheable_choice_is_not_timed(self, monkeypatch, caplog, tmp_path):
        """Processes could find different products faster; the check always has the same result."""
        library = building.library()
        monkeypatch.setattr(tiles, "library", lambda: Moved(library, tmp_path / "missing" / "kernels.so"))
        monkeypatch.setattr(tiles, "_check", lambda kept: TileUse(True, NEVER))
        monkeypatch.setattr(trial, "_try", lambda *_: pytest.fail("it is timed"))
        assert trial.prefers_native(64, 64)
        assert "cannot be stored" in caplog.text

    def test_the_environment_variable_overrides_the_choice(self, monkeypatch, right):
        monkeypatch.setattr(trial, "_try", lambda *_: pytest.fail("it is timed"))
        monkeypatch.setenv("OUTRIDER_AMX", "1")
        assert trial.prefers_native(64, 64)
        self._forget()
        monkeypatch.setattr(tiles, "_check", lambda kept: pytest.fail("tiles are off"))
        monkeypatch.setenv("OUTRIDER_AMX", "0")
        assert not trial.prefers_native(64, 64)
        assert tiles.describe() == "not used"

    def test_the_startup_summary_names_the_products(self, monkeypatch, tmp_path, right):
        """The head has the logits, and so the near-ties; here it alone, then every layer."""
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        monkeypatch.setattr(trial, "_try", lambda out_features, in_features: out_features != LLAMA["vocab_size"])
        args = EngineArgs(model=str(tmp_path), load_format="dummy", dtype="bfloat16", max_model_len=64)
        one, all_ = "Outrider's in 8 and oneDNN's in 1", "oneDNN's in 9"
        for switch, use, served in [(None, "bfloat16, integers from 16 rows on", one), ("0", "not used", all_)]:
            if switch is not None:
                monkeypatch.setenv("OUTRIDER_AMX", switch)
                self._forget()
            engine = EngineCore(args)
            assert engine.info.tiles == f"{use}; products: {served} linear layers"
            engine.shutdown()

    @pytest.mark.parametrize("quantization", [None, "int8"])
    def test_texts_are_the_same_in_any_batch_and_with_drafts(self, tmp_path, right, equal, quantization):
        """The timed choice is made once for each shape, so all steps of a process have the same products."""
        self.file.write_text(json.dumps(TileUse(True, 3)._asdict()))
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        prompts = [list(range(first, first + 11)) * 2 for first in range(2, 50, 9)]
        texts = []
        for speculative in (None, {"method": "ngram", "num_speculative_tokens": 4}):
            values = {"model": str(tmp_path), "load_format": "dummy", "dtype": "bfloat16", "max_model_len": 64}
            engine = EngineCore(EngineArgs(**values, quantization=quantization, speculative_config=speculative))
            assert engine.info.tiles == "bfloat16, integers from 3 rows on; products: Outrider's in 9 linear layers"
            texts += [generate(engine, prompts), *(generate(engine, [prompt]) for prompt in prompts[:2])]
            engine.shutdown()
        assert texts[0] == texts[3]
        assert texts[0][:2] == [*texts[1], *texts[2]] == [*texts[4], *texts[5]]


def generate(engine, prompts):
    """Texts of the prompts, computed together."""
    texts = {str(number): [] for number in range(len(prompts))}
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add_request(EngineRequest(str(number), prompt, params, []))
    while engine.has_work():
        for delta in engine.step():
            assert not delta.error
            texts[delta.request_id] += delta.token_ids
    return list(texts.values())


class Moved:
    """A library whose file seems to lie elsewhere."""

    def __init__(self, library, path):
        self._library, self._name = library, str(path)

    def __getattr__(self, name):
        return getattr(self._library, name)


@pytest.mark.parametrize("call", ["outrider_has_tiles", "outrider_permit_tiles"])
def test_no_trial_without_tiles(kernels, monkeypatch, tmp_path, call):
    """The processor has none, or the system does not grant them, to oneDNN neither."""
    library = Moved(building.library(), tmp_path)
    setattr(library, call, lambda: 0)
    monkeypatch.setattr(tiles, "library", lambda: library)
    monkeypatch.setattr(tiles, "_check", lambda kept: pytest.fail("there are no tiles"))
    tiles.prepare.cache_clear()
    assert tiles.prepare() == NOTHING
    assert trial.prefers_native(64, 64)
    assert tiles.describe() == ""
