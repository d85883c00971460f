"""Any order of requests, loads, unloads, changed files and failures: the manager's state is consistent after every
call."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.lora.adapter import Adapter
from outrider.lora.device.layout import LoraWeights, OwnRows, PackedRows
from outrider.lora.device.sites import AdapterHooks, make_sites
from outrider.lora.manager import AdapterManager
from outrider.lora.tiers.transfers import WriteDone
from outrider.platform.core.config import LoRAConfig
from outrider.platform.core.errors import AdapterError, InvalidUserInputError, NotFoundError
from outrider.platform.core.lora_request import LoRARequest

from .conftest import HIDDEN, make_linears, make_request

pytestmark = pytest.mark.slow

NAMES = st.sampled_from("abcde")


class StepLoader:
    """The loader without its threads: a job is done when `wait` is called, so that runs can be repeated. Long jobs and
    short ones are done in turn."""

    def __init__(self):
        self._jobs, self._last, self.fail_next = {False: [], True: []}, False, False
        self._ended, self.at_once = [], False

    @property
    def num_in_flight(self):
        return sum(map(len, self._jobs.values())) + len(self._ended)

    def submit(self, job, *, num_bytes):
        self._jobs[False].append(job)

    def submit_short(self, job):
        self._jobs[True].append(job)

    def add_result(self, result):
        if self.at_once:
            self._ended.append(self._failing(result))
        else:
            self.submit_short(lambda: result)

    def poll(self):
        ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout):
        if not timeout or self._ended or not self.num_in_flight:
            return self.poll()
        self._last = not self._last if self._jobs[not self._last] else self._last
        return [self._failing(self._jobs[self._last].pop(0)())]

    def _failing(self, result):
        if not self.fail_next:
            return result
        self.fail_next = False
        field = "error" if isinstance(result, WriteDone) else "result"
        return result._replace(**{field: AdapterError("MemoryError: injected")})

    def close(self):
        self._ended.clear()
        for jobs in self._jobs.values():
            jobs.clear()


class ManagerMachine(RuleBasedStateMachine):
    """Folders hold only numbers: the target's content, and that of the draft weights (0: none). 13 is broken: the
    adapter, or its draft weights alone. The ranks follow from the numbers; odd ones have embeddings of their own."""

    MAX_CPU_LORAS = 3
    MAX_CPU_BYTES = None
    ROWS = None

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self._folder = tempfile.TemporaryDirectory()
        self.contents = {name: index for index, name in enumerate("abcde")}
        self.drafts = {name: index % 3 for index, name in enumerate("abcde")}
        self.draft_linears, self.gone, self.known = make_linears(1), set(), set()
        for name in self.contents:
            self._write(name)
        hooks = AdapterHooks(draft_method="draft_model", draft_linears=self.draft_linears, on_gone=self._forget)
        row_bytes = make_sites([], hooks, torch.float32, torch.device("cpu"))[1].row_bytes
        self.row_bytes = row_bytes
        config = LoRAConfig(
            max_loras=2,
            max_cpu_loras=self.MAX_CPU_LORAS,
            max_lora_rank=4,
            memory_bytes=self.ROWS and self.ROWS * row_bytes,
            max_cpu_bytes=self.MAX_CPU_BYTES,
        )
        self.manager = AdapterManager([], config, torch.float32, "cpu", hooks, clock=lambda: self.now)
        self.loader = StepLoader()
        self.manager._files.read, self.manager._transfers._threads = self._parse, self.loader
        self.waiting, self.running, self.seen = [], [], {}

    def teardown(self):
        for request in self.waiting + self.running:
            self.manager.forget(request)
        self.manager.check_integrity()
        self.manager.close()
        self._folder.cleanup()

    def _path(self, name):
        return str(Path(self._folder.name) / name)

    def _write(self, name):
        folder = Path(self._path(name))
        folder.mkdir(exist_ok=True)
        (folder / "draft").mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text("x" * self.contents[name])
        (folder / "draft" / "adapter_config.json").write_text("x" * self.drafts[name])

    def _parse(self, source):
        content, draft = (
            len((Path(source.path) / folder / "adapter_config.json").read_text()) for folder in (".", "draft")
        )
        if content == 13:
            raise AdapterError("broken")
        if draft in (0, 13):
            reason = "broken" if draft else ""
            return self._adapter(content, draft, 1 + content % 4, {}, reason)
        module = "model.layers.0.mlp.down_proj"
        weights = {module: LoraWeights(torch.full((1, 24), float(draft)), torch.full((1, HIDDEN), float(draft)))}
        return self._adapter(content, draft, 1 + max(content % 4, draft % 4), weights, "loaded")

    def _adapter(self, content, draft, rows, draft_weights, reason):
        files = self.manager._files
        target, drafter = files.target.layout.pack({}), files.drafter.layout.pack(draft_weights)
        # The target has no modules here; its rows have no columns.
        empty = torch.zeros(rows, 0), np.zeros((rows, 0), np.uint8)
        target = target._replace(linears=PackedRows(files.target.layout.linears, (), *empty))
        if content % 2:
            target = target._replace(own_rows={"model.embed_tokens": OwnRows(torch.zeros(1, 1), None)})
        return Adapter(self._digest(content, draft), target, drafter, reason)

    @staticmethod
    def _digest(content, draft):
        """The content of unused draft weights does not matter."""
        return bytes([content, draft % 13]) * 16

    def _forget(self, digest):
        self.gone.add(digest)
        assert not self.manager._registry.with_content(digest)

    @rule(name=NAMES, content=st.integers(0, 13))
    def change_files(self, name, content):
        self.contents[name] = content
        self._write(name)

    @rule(name=NAMES, draft=st.integers(0, 13))
    def change_draft(self, name, draft):
        self.drafts[name] = draft
        self._write(name)

    def _registered(self):
        return [(info.name, info.path, info.digest, info.pinned) for info in self.manager.catalog.list()]

    @rule(name=NAMES, folder=NAMES, elsewhere=st.booleans(), priority=st.integers(-1, 1))
    def resolve(self, name, folder, elsewhere, priority):
        path = self._path(folder if elsewhere else name)
        request, before = make_request(name, path, priority=priority), self._registered()
        self.manager.resolve(request)
        if any(registered == name and at != path for registered, at, *_ in before):
            assert self._registered() == before, "an unread version took an adapter's name"
        self.waiting.append(request)

    @rule(failing=st.booleans())
    def schedule(self, failing):
        self.now += 0.5
        self.loader.fail_next = failing  # the first write that is made at once
        for request in sorted(self.waiting, key=lambda request: request.order):
            try:
                reason = self.manager.admit(request)
            except AdapterError as error:
                if "injected" not in error.message and request in self.seen:
                    raise AssertionError("a request that had begun lost its adapter") from error
                self.manager.forget(request)
                self.waiting.remove(request)
                continue
            if reason is None:
                self.waiting.remove(request)
                self.running.append(request)
                namespace = self.seen.setdefault(request, self.manager.namespace(request))
                assert namespace == self.manager.namespace(request), "a request changed its adapter's content"
        self.loader.fail_next = False

    @rule(at_once=st.booleans())
    def small_or_large(self, at_once):
        """True if later writes are done at once."""
        self.loader.at_once = at_once

    @rule(failing=st.booleans())
    def wait(self, failing):
        served = {info.name for info in self.manager.catalog.list() if info.digest}
        self.loader.fail_next = failing
        self.manager.wait(1)
        self.loader.fail_next = False
        assert served <= {info.name for info in self.manager.catalog.list()}, "a request took an adapter's name away"

    @precondition(lambda self: self.running)
    @rule(data=st.data(), preempt=st.booleans())
    def end(self, data, preempt):
        request = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if preempt:
            self.manager.release(request)
            self.waiting.append(request)
        else:
            self.manager.forget(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort_waiting(self, data):
        self.manager.forget(self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1))))

    @rule(name=NAMES, inplace=st.booleans(), pinned=st.booleans())
    def load(self, name, inplace, pinned):
        known = {info.name for info in self.manager.catalog.list()}
        try:
            info = self.manager.catalog.load(
                LoRARequest(name, path=self._path(name)), load_inplace=inplace, pinned=pinned
            )
        except AdapterError:
            assert self.contents[name] == 13
        except InvalidUserInputError:
            assert pinned or name in known
        else:
            draft = self.drafts[name]
            assert info.digest == self._digest(self.contents[name], draft).hex()
            assert info.draft == {0: "", 13: "broken"}.get(draft, "loaded")

    @rule(name=NAMES, abort=st.booleans())
    def unload(self, name, abort):
        requests = [r for r in self.running + self.waiting if r.adapter.name == name and r.adapter.error is None]
        if name not in {info.name for info in self.manager.catalog.list()} and not (abort and requests):
            with pytest.raises(NotFoundError):
                self.manager.catalog.unload(name)
            return
        ending = self.manager.catalog.unload(name, "abort" if abort else "drain")
        assert set(ending) >= set(requests if abort else ())
        for request in ending:
            (self.running if request in self.running else self.waiting).remove(request)
            self.manager.forget(request)

    @rule(name=NAMES, pinned=st.booleans())
    def pin(self, name, pinned):
        before = {info.name: info for info in self.manager.catalog.list()}
        try:
            info = self.manager.catalog.pin(name) if pinned else self.manager.catalog.unpin(name)
        except NotFoundError:
            assert name not in before
        except AdapterError as error:  # one that is in no memory is read again
            changed = "have changed since it was loaded" in error.message
            assert changed or 13 in self.contents.values()  # an engine's own name may have another's folder
        except InvalidUserInputError:
            # Those that were being read may have turned out broken.
            pinned_now = {info.name: info.pinned for info in self.manager.catalog.list()}
            assert pinned_now.items() <= {n: i.pinned for n, i in before.items()}.items()
        else:
            assert (info.pinned, info.level == "device") == (pinned, pinned or info.level == "device")

    @rule(name=NAMES)
    def register(self, name):
        if name in {info.name for info in self.manager.catalog.list()}:
            with pytest.raises(InvalidUserInputError):
                self.manager.catalog.register([LoRARequest(name, path=self._path(name))])
        else:
            self.manager.catalog.register([LoRARequest(name, path=self._path(name))])

    @rule()
    def prefetch(self):
        for request in sorted(self.waiting, key=lambda request: request.order)[:3]:
            self.manager.prefetch(request)

    @invariant()
    def agrees(self):
        self.manager.check_integrity()
        self._check_budget()
        rows = [(request.adapter, 1) for request in self.running]
        batch = self.manager.prepare(rows)
        assert (batch is None) == (not rows)
        self._check_draft_rows(rows)
        current = {version.digest for version in self.manager._registry if version.digest is not None}
        self.gone -= current  # a content may come back
        self.known |= current
        assert self.known - current <= self.gone, "the drafter did not drop a content that is gone"

    def _check_budget(self):
        """Adapters on the device take no more than `lora_memory`, embeddings included."""
        host, pool = self.manager._residency.host, self.manager._residency.pool
        placed = [host._adapters[digest] for digest in pool.digests()]
        used = sum(adapter.rows * self.row_bytes + adapter.bytes_outside_rows for adapter in placed)
        assert used <= (self.ROWS or pool.num_rows + 0.1) * self.row_bytes
        assert self.ROWS is None or pool.num_rows - pool.num_free >= used / self.row_bytes

    def _check_draft_rows(self, rows):
        """Each running request finds the draft weights of its own content only."""
        drafts = [request.adapter.digest[1] for request in self.running]
        batch = self.manager.prepare_draft(rows)
        assert (batch is None) == (not any(drafts))
        if batch is None:
            return
        x, y = torch.ones(len(rows), 24), torch.zeros(len(rows), HIDDEN)
        self.draft_linears[1].lora.add(y, x, batch)
        assert y.tolist() == [[24.0 * draft * draft] * HIDDEN for draft in drafts]

    @rule()
    def nobody_waits_forever(self):
        """Once running requests have ended, all waiting ones are admitted."""
        for _ in range(100):
            for request in self.running:
                self.manager.forget(request)
            self.running = []
            self.schedule(failing=False)
            self.manager.wait(1)
            if not (self.waiting or self.loader.num_in_flight):
                break
        for request in self.running:
            self.manager.forget(request)
        self.running = []
        assert not self.waiting


class TightMachine(ManagerMachine):
    """Host memory has room for no more adapters than run."""

    MAX_CPU_LORAS = 2


class FewRowsMachine(ManagerMachine):
    """The device has room for one adapter of the largest rank, or for several small ones."""

    MAX_CPU_LORAS = 5
    ROWS = 5


class FewBytesMachine(ManagerMachine):
    """Host memory has room for two adapters, however many may be there."""

    MAX_CPU_LORAS = 5
    MAX_CPU_BYTES = 500


MACHINES = [ManagerMachine, TightMachine, FewRowsMachine, FewBytesMachine]
for machine in MACHINES:
    machine.TestCase.settings = settings(max_examples=20, stateful_step_count=30, database=None)
TestManagerMachine, TestTightMachine, TestFewRowsMachine, TestFewBytesMachine = (m.TestCase for m in MACHINES)


def test_a_pin_ends_when_a_request_replaces_the_adapter():
    machine = ManagerMachine()
    catalog, request = machine.manager.catalog, make_request("a", machine._path("a"))
    catalog.load(LoRARequest("a", path=machine._path("b")))
    machine.manager.resolve(request)
    machine.waiting.append(request)
    machine.manager.prefetch(request)
    machine.loader._last = True  # the read ends before the write of what is pinned
    with pytest.raises(InvalidUserInputError, match="has replaced the adapter 'a'"):
        catalog.pin("a")
    assert [(info.path, info.pinned) for info in catalog.list()] == [(machine._path("a"), False)]
    machine.teardown()
