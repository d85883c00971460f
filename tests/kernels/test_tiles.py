"""Products by AMX tiles, as they are compiled; a handler computes the instructions that this processor refuses
(tile_trap.cpp). And the choice between them and today's products."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.kernels import native as building
from outrider.kernels.experts import native as experts_native
from outrider.kernels.experts.native import NativeExperts
from outrider.kernels.experts.torch import Routing
from outrider.kernels.linear import NativeLinear, pack, trial
from outrider.kernels.linear import native as linear_native
from outrider.kernels.linear.invariant import trial_operands
from outrider.kernels.lora.native import NativeRows, RowSegments
from outrider.kernels.native import compiler, tiles
from outrider.kernels.native.tiles import NEVER, TileUse
from outrider.kernels.quantized_linear import native as quantized_native
from outrider.kernels.quantized_linear.native import NativeQuantizedLinear

from .test_linear_native import operands
from .test_quantized_native import inputs_of, make

COMPILER = shutil.which("g++")
INFO = Path("/proc/cpuinfo")
NEEDED = {"avx512_bf16", "avx512_vnni", "avx512bw"}
SOURCES = ("experts", "linear", "lora", "native", "quantized_linear")

FLAGS = set(INFO.read_text().split()) if INFO.exists() else set()

pytestmark = pytest.mark.skipif(
    COMPILER is None or not NEEDED.issubset(FLAGS) or "amx_tile" in FLAGS,
    reason="no g++, or a processor without AVX512-BF16, or one that computes the tiles itself",
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Kernels for a processor with tiles, which this process and its children find in the cache."""
    cache = tmp_path_factory.mktemp("cache")

    def compile_some(command, scratch, library):
        options = ["-O1", "-march=native", "-std=c++17", "-fPIC", "-w", "-fno-math-errno"]
        include = f"-I{compiler.KERNELS / 'native'}"
        sources = [compiler.KERNELS / name / "native.cpp" for name in SOURCES]
        sources.append(Path(__file__).with_name("tile_trap.cpp"))
        objects = [scratch / f"{index}.o" for index in range(len(sources))]
        jobs = [
            subprocess.Popen([*command, *options, "-fopenmp", include, "-c", str(source), "-o", str(made)])
            for source, made in zip(sources, objects, strict=True)
        ]
        assert [job.wait(120) for job in jobs] == [0] * len(jobs)
        # Symbolic: the trap's `syscall` is that of the library.
        subprocess.run([*command, "-shared", "-Wl,-Bsymbolic", *objects, "-o", library], check=True, timeout=60)

    users = (experts_native, linear_native, quantized_native)
    clear = (tiles.prepare, trial._wins, *(module._functions for module in users))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("CXX", f"{COMPILER} -mamx-tile -mamx-bf16 -mamx-int8")
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        monkeypatch.setenv("OUTRIDER_AMX", "1")
        monkeypatch.setattr(compiler, "_compile", compile_some)
        path = compiler.build()
        library = ctypes.PyDLL(str(path))
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
    assert tiles.are_compiled()
    assert tiles.use(TileUse(True, 1))
    yield
    tiles.use(TileUse(False, NEVER))


@pytest.mark.parametrize("shape", [(1, 2), (70, 6), (64, 64), (129, 1066)], ids=str)
def test_products_of_bfloat16(chosen, shape):
    """Against float64: 2^-8 for the rounding of the result. A row has the same bits beside any others."""
    weight, x, bias, residual = operands(50, shape)
    linear = NativeLinear([weight], bias)
    y = linear(x, residual)
    dense = x.double() @ weight.double().T
    torch.testing.assert_close(y.double(), dense + bias.double() + residual.double(), rtol=2**-8, atol=1e-4)
    torch.testing.assert_close(linear.without_bias(x[:9]).double(), dense[:9], rtol=2**-8, atol=1e-4)
    for start, stop in [(0, 1), (3, 5), (0, 16), (7, 24), (17, 50)]:
        assert torch.equal(linear(x[start:stop], residual[start:stop]), y[start:stop])
    tiles.use(TileUse(False, NEVER))
    torch.testing.assert_close(linear(x, residual).double(), y.double(), rtol=2**-7, atol=1e-4)


def test_bits_of_tiles_are_their_own(chosen):
    """The sums have another order than without tiles: so tiles serve every number of rows, or none."""
    x, weight = trial_operands((16, 512), (64, 512), torch.Generator().manual_seed(0))
    linear, x = NativeLinear([weight.bfloat16()], None), x.bfloat16()
    with_tiles = linear(x)
    tiles.use(TileUse(False, NEVER))
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
    linear, x = NativeQuantizedLinear([make(kind, 70, 333, group)], None), inputs_of(35, 333)
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
    tiles.use(TileUse(False, NEVER))
    torch.testing.assert_close(experts(x, routing), y, rtol=2**-6, atol=1e-3)


class TestChoice:
    @pytest.fixture(autouse=True)
    def _forgotten(self, kernels):
        self.file = kernels.with_suffix(".tiles.json")
        self.file.unlink(missing_ok=True)
        tiles.prepare.cache_clear()
        trial._wins.cache_clear()
        yield
        self.file.unlink(missing_ok=True)
        tiles.use(TileUse(False, NEVER))

    @pytest.mark.parametrize(
        ("fault", "pairs"), [("", True), ("wrong bytes", True), ("wrong pairs", False), ("crash", False)]
    )
    def test_a_child_tries_the_tiles_first(self, monkeypatch, caplog, fault, pairs):
        monkeypatch.setenv("OUTRIDER_TILE_FAULT", fault)
        assert tiles.prepare() == TileUse(pairs, NEVER)  # the emulation is slow
        assert ("check failed" in caplog.text) == (fault == "crash")
        kept = json.loads(self.file.read_text())
        assert kept["pairs"] is pairs
        if not pairs:
            assert not isinstance(pack(torch.zeros(64, 64).bfloat16()), NativeLinear)

    def test_the_result_is_kept(self):
        tiles.remember({"pairs": True, "byte_rows": 16})
        assert tiles.prepare() == TileUse(True, 16)

    @pytest.mark.parametrize("content", ["", "[1]", '{"pairs": 3, "byte_rows": 1}', '{"pairs": true, "byte_rows": -1}'])
    def test_a_damaged_file_is_made_again(self, monkeypatch, content):
        self.file.write_text(content)
        monkeypatch.setattr(tiles, "_check", lambda: TileUse(True, 7))
        assert tiles.prepare() == TileUse(True, 7)

    def test_a_child_has_limited_time(self, monkeypatch, caplog):
        monkeypatch.setattr(tiles, "CHECK_SECONDS", 0.01)
        assert tiles.prepare() == TileUse(False, NEVER)
        assert "timed out" in caplog.text

    @pytest.mark.parametrize("slow", [None, 1, 128])
    def test_each_shape_is_tried(self, monkeypatch, slow):
        """The native product is used where it takes no longer with any number of rows; the result is kept."""
        asked = []

        def seconds(product, x):
            asked.append(len(x))
            return 2.0 if isinstance(product, NativeLinear) and len(x) == slow else 1.0

        monkeypatch.setattr(trial, "_seconds", seconds)
        tiles.remember({"pairs": True, "byte_rows": 16})
        for _ in range(2):
            assert isinstance(pack(torch.zeros(64, 32).bfloat16()), NativeLinear) == (slow is None)
        number = len(asked)
        trial._wins.cache_clear()
        assert trial.is_fastest(64, 32) == (slow is None)
        assert len(asked) == number
        assert not trial.is_fastest(32, 64) or slow is None

    def test_slow_tiles_are_not_used(self):
        tiles.remember({"pairs": True, "byte_rows": 16})
        assert not trial.is_fastest(256, 256)  # the emulation takes a thousand times as long


def test_nothing_is_tried_unasked(monkeypatch):
    monkeypatch.delenv("OUTRIDER_AMX", raising=False)
    monkeypatch.setattr(tiles, "_check", lambda: pytest.fail("nobody has asked"))
    tiles.prepare.cache_clear()
    assert tiles.prepare() == TileUse(False, NEVER)
    assert trial.is_fastest(64, 64) != tiles.are_compiled()
