"""A model's projections, embeddings and gains with the kernels of a CUDA device, against the torch path on the CPU."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from outrider.kernels.lora import device_rows
from outrider.lora.adapter import AdapterSource
from outrider.lora.device import arena, batching, layers, vectors
from outrider.lora.device.batching import LoraBatcher, StepAdapters
from outrider.lora.device.layout import LM_HEAD, LoraWeights
from outrider.lora.device.pool import Allocation, RowPool
from outrider.lora.device.sites import AdapterSites
from outrider.lora.registry.versions import AdapterVersion
from outrider.models.layers.embedding import EMBEDDING, Embedding
from outrider.models.layers.linear import Linear

SLICES = {"q": 24, "k": 8, "v": 8, "down": 20}
HIDDEN, VOCAB = 20, 50
Rows = Sequence[tuple[Allocation | None, int]]


class Model:
    """A merged projection with a bias, another without, embeddings and a head, and three adapters."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        common = {"dtype": torch.float32, "device": device}
        self.qkv = Linear("qkv", [("q", 24), ("k", 8), ("v", 8)], HIDDEN, bias=True, **common)
        self.down = Linear("down", [("down", 20)], HIDDEN, **common)
        self.embedding = Embedding(VOCAB, HIDDEN, tied=False, **common)
        for part in (self.qkv, self.down, self.embedding):
            for slot in part.weight_slots().values():
                slot.load(torch.randn(slot.shape))
        self.sites = AdapterSites([self.qkv, self.down], self.embedding, torch.float32, device)
        self.pool = RowPool(24, 8)
        self.sites.allocate(24)
        self.place(b"plain", 3, ["q", "v", "down"])
        self.place(b"dora", 5, ["q", "k", "down"], gains=True)
        self.place(b"words", 2, ["k", EMBEDDING, LM_HEAD], gains=True)

    def place(self, key: bytes, rank: int, names: Sequence[str], *, gains: bool = False) -> None:
        weights = {}
        for name in names:
            out = {EMBEDDING: HIDDEN, LM_HEAD: VOCAB}.get(name) or SLICES[name]
            in_features = VOCAB if name == EMBEDDING else HIDDEN
            gain = torch.rand(out) + 0.5 if gains else None
            weights[name] = LoraWeights(torch.randn(rank, in_features), torch.randn(rank, out), gain)
        biases = {name: torch.randn(part.b.shape[1]) for name, part in weights.items() if gains and name != EMBEDDING}
        packed = self.sites.model.layout.pack(weights)._replace(biases=biases)
        self.sites.write(self.pool.allocate(key, rank), packed)

    def rows(self, *items: tuple[bytes | None, int]) -> Rows:
        return [(self.pool.allocation(key) if key else None, count) for key, count in items]

    def run(self, rows: Rows, batcher: LoraBatcher) -> list[torch.Tensor]:
        torch.manual_seed(1)
        num_tokens = sum(count for _, count in rows)
        x, residual = torch.randn(2, num_tokens, HIDDEN).to(self.device)
        ids = torch.randint(VOCAB, (num_tokens,)).to(self.device)
        batch = batcher.build(rows)
        step = SimpleNamespace(adapters=batch)
        results = [self.qkv.forward(x, step), self.down.forward(x, step, residual)]
        results += [self.embedding.lookup(ids, batch), self.embedding.logits(x, batch)]
        return [result.cpu() for result in results]


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a CUDA device, on the CPU with Triton's interpreter too."""
    for module in (arena, batching, vectors):
        monkeypatch.setattr(module, "is_grouped", lambda dtype, device: True)


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model on the CPU without any kernel of ours; made before `grouped` takes effect."""
    for module in (batching, layers):
        monkeypatch.setattr(module, "is_native", lambda dtype, device: False)
    return Model(torch.device("cpu"))


MIXES: list[list[tuple[bytes | None, int]]] = [
    [(b"plain", 1)],
    [(None, 2), (b"dora", 1), (b"plain", 3), (b"words", 1), (b"dora", 2), (None, 1)],
    [(b"words", 6)],
    [(b"plain", 70), (None, 3), (b"dora", 20)],
]


@pytest.fixture
def expected(by_torch: Model) -> list[list[torch.Tensor]]:
    batcher = LoraBatcher(torch.float32, by_torch.device)
    return [by_torch.run(by_torch.rows(*mix), batcher) for mix in MIXES]


def test_every_site_of_a_model(expected: list[list[torch.Tensor]], grouped: None, device: str) -> None:
    model = Model(torch.device(device))
    batcher = StepAdapters(model.pool, torch.float32, model.device, 8)._tokens
    for mix, results in zip(MIXES, expected, strict=True):
        rows = model.rows(*mix)
        for actual, wanted in zip(model.run(rows, batcher), results, strict=True):
            torch.testing.assert_close(actual, wanted, atol=2e-4, rtol=2e-4)
        groups = batcher.build(rows).groups
        assert groups.replayable
        assert groups.data.data_ptr() == batcher._buffer.data.data_ptr()


def test_rows_of_an_evicted_adapter_are_not_read(grouped: None, device: str) -> None:
    model = Model(torch.device(device))
    batcher = LoraBatcher(torch.float32, model.device)
    base = model.run(model.rows((None, 2)), batcher)
    model.pool.evict(b"dora")
    model.place(b"narrow", 5, ["down"])
    after = model.run(model.rows((b"narrow", 2)), batcher)
    assert torch.equal(after[0], base[0])  # qkv, which it does not adapt
    assert not torch.equal(after[1], base[1])


@pytest.mark.parametrize("is_plain", [False, True])
def test_steps_with_gains_are_not_replayed(is_plain: bool, grouped: None, device: str) -> None:
    model = Model(torch.device(device))
    steps = StepAdapters(model.pool, torch.float32, model.device, 8)
    version = AdapterVersion("x", AdapterSource("/x"))
    version.digest, version.is_plain = b"plain", is_plain
    batch = steps.prepare([(version, 2), (None, 1)])
    assert batch is not None
    assert batch.replayable == is_plain
    assert steps.prepare_head([(version, 1)]) is None


def test_base_tokens_alone_have_no_batch(grouped: None, device: str) -> None:
    model = Model(torch.device(device))
    assert LoraBatcher(torch.float32, model.device).build(model.rows((None, 4))) is None


def test_batch_invariant_step_uses_only_invariant_paths(grouped: None, device: str) -> None:
    model = Model(torch.device(device))
    batch = LoraBatcher(torch.float32, model.device, batch_invariant=True).build(model.rows((b"plain", 2)))
    assert batch.invariant
    assert batch.groups.invariant
    assert not LoraBatcher(torch.float32, model.device).build(model.rows((b"plain", 2))).groups.invariant


class Sides:
    """Records what a step launches, in order, while a graph is captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        for name in ("shrink_kernel", "expand_kernel"):
            monkeypatch.setattr(device_rows, name, self._noting(name, getattr(device_rows, name)))
        monkeypatch.setattr(device_rows, "run_alongside", self._run)

    def _noting(self, name: str, kernel: Any) -> Any:
        class Noting:
            def __getitem__(_, grid: Any) -> Any:
                return lambda *args, **options: (self.events.append(name), kernel[grid](*args, **options))

        return Noting()

    def _run(self, work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        self.events.append("fork")
        work()
        return lambda: self.events.append("join")

    def product(self, linear: Linear) -> None:
        packed = linear.packed
        linear._packed = lambda *args: (self.events.append("product"), packed(*args))[1]


def test_the_shrink_runs_alongside_the_product(grouped: None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between fork and join there is the product alone, so that the expand alone is on the path."""
    model = Model(torch.device(device))
    sides = Sides(monkeypatch)
    sides.product(model.down)
    batch = LoraBatcher(torch.float32, model.device).build(model.rows((b"plain", 3)))
    model.down.forward(torch.randn(3, HIDDEN, device=device), SimpleNamespace(adapters=batch))
    assert sides.events == ["fork", "shrink_kernel", "product", "join", "expand_kernel"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
def test_a_captured_step_with_two_streams_is_replayed(grouped: None) -> None:
    model = Model(torch.device("cuda"))
    steps = StepAdapters(model.pool, torch.float32, model.device, 8)
    batch = steps._tokens.build(model.rows((b"plain", 3)))
    x = torch.randn(3, HIDDEN, device="cuda")
    step = SimpleNamespace(adapters=batch)
    expected = model.qkv.forward(x, step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = model.qkv.forward(x, step)
    for _ in range(20):
        found.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(found, expected)
