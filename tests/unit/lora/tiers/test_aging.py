"""No starvation: a bound on each request's wait under constant load, and the cost of thousands of names."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.lora.adapter import Adapter
from outrider.lora.device.layout import LoraWeights
from outrider.lora.device.sites import AdapterHooks, make_sites
from outrider.lora.manager import AdapterManager
from outrider.lora.registry.registry import AdapterRegistry
from outrider.lora.tiers.starvation import AGING_SECONDS, LOOK_SECONDS
from outrider.platform.core.config import LoRAConfig
from outrider.platform.core.lora_request import LoRARequest

from ..conftest import HIDDEN, admitted, make_linears, make_request, module, settle
from ..test_manager_machine import StepLoader

STEP_SECONDS = 0.1


@dataclass
class Load:
    """16 adapters requested, with room for 8: requests arrive without end, and each runs for some steps."""

    config: LoRAConfig
    ranks: list[int]
    now: float = 0.0
    waiting: list = field(default_factory=list)
    running: dict = field(default_factory=dict)
    """Request -> the step at which it ends."""
    added: dict = field(default_factory=dict)
    """Request -> when it was added."""
    longest: float = 0.0

    def __post_init__(self):
        self.manager = AdapterManager(make_linears(1), self.config, torch.float32, "cpu", clock=lambda: self.now)
        self.manager._transfers._threads = StepLoader()
        self.manager._files.check = lambda source: None
        self.manager._files.read = self._read

    def _read(self, source):
        index = int(source.path.rsplit("/", 1)[-1])
        layout = self.manager._files.target.layout
        weights = LoraWeights(torch.zeros(self.ranks[index], 24), torch.zeros(self.ranks[index], HIDDEN))
        target = layout.pack({module(0, "down_proj"): weights})
        return Adapter(bytes([index]) * 32, target, self.manager._files.drafter.layout.pack({}))

    def arrive(self, index):
        request = make_request(str(index), f"/adapters/{index}")
        self.manager.resolve(request)
        self.added[request] = self.now
        self.waiting.append(request)

    def step(self, number, duration):
        """One step of the engine: finished requests leave, others are admitted, one transfer ends."""
        self.now += STEP_SECONDS
        for request in [request for request, end in self.running.items() if end <= number]:
            del self.running[request]
            self.manager.forget(request)
        for request in list(self.waiting):
            if self.manager.admit(request) is None:
                self.waiting.remove(request)
                self.running[request] = number + duration(request)
                self.longest = max(self.longest, self.now - self.added[request])
        self.manager.wait(1)

    def close(self):
        for request in (*self.running, *self.waiting):
            self.manager.forget(request)
        self.manager.check_integrity()
        self.manager.close()


LONGEST = 5  # steps


@pytest.mark.slow
@settings(max_examples=20, database=None)
@given(seed=st.integers(0, 2**32), few_rows=st.booleans(), tight=st.booleans(), hot=st.booleans())
def test_the_wait_is_bounded_for_16_adapters_on_8_slots(seed, few_rows, tight, hot):
    """A request waits at most until it has aged, and then for each of the other adapters as long as one request runs,
    and until its own and theirs have been read and written, of which one ends in a step."""
    chance = random.Random(seed)
    rows = 20 if few_rows else 32
    hooks = AdapterHooks(draft_linears=make_linears(1))
    row_bytes = make_sites([], hooks, torch.float32, torch.device("cpu"))[1].row_bytes
    config = LoRAConfig(max_loras=8, max_cpu_loras=8 if tight else 16, max_lora_rank=4, memory_bytes=rows * row_bytes)
    ranks = [chance.randint(1, 4) for _ in range(16)]
    load = Load(config, ranks)
    bound = AGING_SECONDS + LOOK_SECONDS + 16 * (LONGEST + 4) * STEP_SECONDS
    for number in range(340):
        if number < 190:
            # Hot: eight are asked for in every step, so that they never come free by themselves.
            for index in [*range(8), chance.randint(8, 15)] if hot else chance.choices(range(16), k=4):
                load.arrive(index)
        load.step(number, lambda request: chance.randint(2, LONGEST))
        oldest = min((load.added[request] for request in load.waiting), default=load.now)
        assert load.now - oldest <= bound, "a request waits too long"
    assert not load.waiting
    load.close()
    assert load.longest > 0


def test_popular_adapters_do_not_keep_the_slots(make_manager, folder):
    """Two adapters with endless requests and room for one: both run, in turn."""
    now = [0.0]
    manager = make_manager(max_loras=1, max_lora_rank=4, clock=lambda: now[0])
    paths = {name: folder(name) for name in "ab"}
    waiting, running, turns = [], {}, []
    for step in range(400):
        now[0] += STEP_SECONDS
        for name in "ab":
            waiting.append(make_request(name, paths[name]))
            manager.resolve(waiting[-1])
        for request in list(waiting):
            if settle(manager, request) is None:
                waiting.remove(request)
                running[request] = step
                turns += [request.lora.name] if turns[-1:] != [request.lora.name] else []
        for request in [request for request, began in running.items() if step - began >= 3]:
            del running[request]
            manager.forget(request)
    assert len(turns) >= 400 * STEP_SECONDS / (AGING_SECONDS + 1)
    for request in (*running, *waiting):
        manager.forget(request)


def test_a_pinned_adapter_shares_the_running_slots(make_manager, folder):
    """It stays on the device, and still lets others run in turn."""
    now = [0.0]
    manager = make_manager(max_loras=1, max_lora_rank=4, memory_bytes=1 << 20, clock=lambda: now[0])
    manager.catalog.load(LoRARequest("p", path=folder("p")), pinned=True)
    running = [admitted(manager, "p", folder("p"))]
    other = make_request("b", folder("b"))
    manager.resolve(other)
    assert settle(manager, other) == "max_loras"
    now[0] = AGING_SECONDS + 1
    late = make_request("p", folder("p"), "late")
    manager.resolve(late)
    assert settle(manager, late) is not None
    manager.forget(running[0])
    assert settle(manager, other) is None
    manager.forget(other)
    assert settle(manager, late) is None
    manager.forget(late)


# --- thousands of names ---


def test_steps_and_requests_do_not_look_at_all_names(make_manager, folder, tmp_path, monkeypatch):
    """2000 are registered; requests, releases, loads and statistics go through none that is not in use."""
    manager = make_manager(max_loras=2, max_cpu_loras=4)
    idle = str(tmp_path / "idle")
    (tmp_path / "idle").mkdir()
    monkeypatch.setattr("outrider.lora.files.folder.AdapterFiles.read", None)  # nothing is read
    manager.catalog.register([LoRARequest(f"n{i}", path=idle) for i in range(2000)])
    monkeypatch.undo()
    assert len(manager.catalog.list()) == manager.catalog.stats().num_adapters == 2000
    manager.catalog.register([LoRARequest(name, path=folder(name)) for name in "abcdef"])

    def everything(self):
        raise AssertionError("all names were visited")

    monkeypatch.setattr(AdapterRegistry, "__iter__", everything)
    monkeypatch.setattr(AdapterRegistry, "current", everything)
    for name in "abcdefabc":
        request = admitted(manager, name, folder(name))
        assert {info.name for info in manager.catalog.stats().adapters} <= set("abcdef")
        manager.release(request)
        manager.forget(request)
    manager.catalog.load(LoRARequest("g", path=folder("g")), pinned=True)
    manager.catalog.unpin("g")
    manager.catalog.unload("g")
    manager.catalog.unload("a", "abort")
    assert manager.catalog.stats().num_adapters == 2005
    monkeypatch.undo()


def test_thousands_of_requests_for_one_adapter(make_manager, folder):
    """The next one is found without visiting all waiting ones: each order is compared a few times, not thousands."""
    manager, num_requests = make_manager(), 3000
    path, compared = folder("a"), [0]

    class Order(tuple):
        def __lt__(self, other):
            compared[0] += 1
            return tuple.__lt__(self, other)

    requests = [make_request("a", path, str(i)) for i in range(num_requests)]
    for request in requests:
        request.order = Order(request.order)
        manager.resolve(request)
    assert settle(manager, requests[0]) is None
    for request in requests:
        assert manager.admit(request) is None
        assert request.adapter.first_waiting() is not request
    for request in requests:
        manager.forget(request)
    assert compared[0] < 40 * num_requests
