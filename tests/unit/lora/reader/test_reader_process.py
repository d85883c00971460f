"""Any failure of the reader process only costs time, and leaves nothing behind."""

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from outrider.lora.adapter import AdapterSource
from outrider.lora.device.sites import AdapterHooks
from outrider.lora.manager import AdapterManager
from outrider.lora.reader import reader_client as reader_module
from outrider.lora.reader.reader_client import AdapterReader
from outrider.platform.core.adapter_files import AdapterFolder
from outrider.platform.core.config import LoRAConfig
from outrider.platform.core.errors import AdapterError
from outrider.platform.core.lora_request import LoRARequest

from ..conftest import SIZES, admitted, make_linears, write_adapter
from ..reading import Both, assert_same

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def both():
    with Both() as made:
        yield made


@pytest.fixture
def running(both):
    """The same, with the process ready."""
    assert both.reader.wait_ready(60)
    return both


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def in_thread(work):
    """Start `work`; returns a function that waits for its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()

    def result():
        thread.join(30)
        return results[0]

    return result


def test_killed_during_a_load_or_hung(running, tmp_path, monkeypatch, caplog):
    path, reader = write_adapter(tmp_path / "a"), running.reader
    pid = reader.pid
    os.kill(pid, signal.SIGSTOP)
    result = in_thread(lambda: running.by_process(path))
    wait_until(reader._lock.locked)
    time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    assert result() is None, "the caller reads it"
    assert "is started again when it is needed" in caplog.text
    assert reader.wait_ready(60)
    assert reader.pid != pid
    assert_same(running.by_process(path), running.by_thread(path))
    assert reader._num_failures == 0

    pid = reader.pid
    monkeypatch.setattr(reader_module, "READ_SECONDS", 0.2)
    os.kill(pid, signal.SIGSTOP)
    assert running.by_process(path) is None
    assert "TimeoutError" in caplog.text
    wait_until(lambda: not alive(pid))


def test_nothing_is_left_of_many_loads(running, tmp_path):
    paths = [write_adapter(tmp_path / str(seed), seed=seed) for seed in range(4)]
    bad = write_adapter(tmp_path / "bad", rank=3, r=2)

    def descriptors():
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in ("self", running.reader.pid)]

    def maps():
        return Path("/proc/self/maps").read_text().count("outrider-adapter")

    def load(times):
        for index in range(times):
            running.by_process(paths[index % 4])
            with pytest.raises(AdapterError):
                running.by_process(bad)

    def resident():
        return int(Path(f"/proc/{running.reader.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    load(20)
    gc.collect()
    before, memory = (descriptors(), maps()), resident()
    load(40)
    gc.collect()
    assert (descriptors(), maps()) == before
    assert resident() < memory + (8 << 20)


def test_a_process_that_cannot_start_is_given_up(both, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    reader = AdapterReader(both.files)
    source = AdapterSource(write_adapter(tmp_path / "a"))
    for _ in range(reader_module.READS_BEFORE):
        assert reader.read(source) is None
        assert reader.pid is None, "few adapters need no process"

    def gives_up():
        assert reader.read(source) is None
        return "it is not started again" in caplog.text

    wait_until(gives_up)
    assert caplog.text.count("reader process failed") == reader_module.MAX_FAILURES
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    other = AdapterReader(both.files)
    assert not other.wait_ready(0.2)
    assert other._num_failures == reader_module.MAX_FAILURES
    reader.close()
    other.close()


def test_a_folder_of_draft_weights_that_cannot_be_resolved_counts_as_empty(both, tmp_path, monkeypatch):
    source = AdapterSource(write_adapter(tmp_path / "a"))
    expected = both.files.num_bytes(source)

    def too_long(*_):
        raise OSError(errno.ENAMETOOLONG, "File name too long")

    monkeypatch.setattr(AdapterFolder, "below", too_long)
    assert both.files.num_bytes(source) == expected > 0


def test_large_adapters_start_the_process_sooner(both, tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "BYTES_BEFORE", 1)
    reader = AdapterReader(both.files)
    reader.read(AdapterSource(write_adapter(tmp_path / "a")))
    assert reader.pid is not None
    reader.close()


def test_close_does_not_wait_for_one_that_hangs(both, tmp_path):
    reader = AdapterReader(both.files)
    assert reader.wait_ready(60)
    pid, source = reader.pid, AdapterSource(write_adapter(tmp_path / "a"))
    os.kill(pid, signal.SIGSTOP)
    result = in_thread(lambda: reader.read(source))
    wait_until(reader._lock.locked)
    reader.close()
    assert result() is None
    assert not alive(pid)
    assert reader.read(source) is None, "it is not started any more"
    assert reader.pid is None


@pytest.mark.parametrize("held", [False, True], ids=["socket closed", "socket held by a fork"])
def test_the_reader_ends_with_the_engines_process(tmp_path, held):
    script = tmp_path / "engine.py"
    script.write_text(
        f"""
import os, signal, sys, time
import torch
from outrider.lora.files.folder import AdapterFiles
from outrider.lora.files.tensor_keys import ModelModules
from outrider.lora.device.layout import ModelLayout, RowLayout
from outrider.lora.reader.reader_client import AdapterReader

models = [ModelModules({{}}, ModelLayout(*(RowLayout(torch.float32) for _ in range(2)))) for _ in range(2)]
reader = AdapterReader(AdapterFiles(*models, draft_method="", max_rank=8))
assert reader.wait_ready(60)
if {held} and os.fork() == 0:
    time.sleep(5)
    os._exit(0)
print(reader.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
    wait_until(lambda: not alive(pid))


def test_the_reader_process_is_nicer_if_allowed(both, tmp_path, monkeypatch):
    source = AdapterSource(write_adapter(tmp_path / "a"))
    reader = AdapterReader(both.files)
    reader.start()
    assert reader.pid is not None, "at once, before anything is read"
    assert os.getpriority(os.PRIO_PROCESS, reader.pid) == min(
        19, os.getpriority(os.PRIO_PROCESS, 0) + reader_module.NICE
    )
    reader.close()

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    other = AdapterReader(both.files)
    assert other.wait_ready(60)
    assert other.read(source) is not None
    other.close()


def test_the_reader_process_shortens_steps_on_a_free_core_or_if_they_are_long(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert reader_module.shortens_steps(1)
    assert not reader_module.shortens_steps(2)
    assert reader_module.shortens_steps(2, long_steps=True)
    monkeypatch.setenv(reader_module.SWITCH, "0")
    assert not reader_module.shortens_steps(1)


# --- in an engine ---


def mapped():
    """Adapters' memory that is mapped."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("outrider-adapter")


def test_an_engine_signals_long_steps_to_the_reader(folder):
    config = LoRAConfig(max_loras=2, max_cpu_loras=2, max_lora_rank=8)
    manager = AdapterManager(make_linears(), config, torch.float32, "cpu", AdapterHooks(reader_process=True))
    try:
        reader = manager._transfers.reader
        manager.prepare([(None, 24), (None, 1)])
        assert reader.flag.is_set()
        assert reader.wait_ready(60)
        assert reader.read(AdapterSource(folder("a"))) is not None, "it waits, but not forever"
        manager.prepare([(None, 1), (None, 1)])
        assert not reader.flag.is_set()
    finally:
        manager.close()


def test_an_engine_reads_with_it(folder):
    linears, before = make_linears(), mapped()
    config = LoRAConfig(max_loras=2, max_cpu_loras=2, max_lora_rank=8)
    manager = AdapterManager(linears, config, torch.float32, "cpu", AdapterHooks(reader_process=True))
    try:
        reader = manager._transfers.reader
        manager.catalog.load(LoRARequest("early", path=folder("early")))
        assert reader.pid is None
        assert reader.wait_ready(60)
        request = admitted(manager, "a", folder("a"))
        assert reader.num_answers == 1
        assert mapped() == before + 1, "the host tier keeps what the process made, and no other copy"
        linear, y = linears[3], torch.zeros(1, SIZES["down_proj"][1])
        linear.lora.add(y, torch.ones(1, linear.in_features), manager.prepare([(request.adapter, 1)]))
        adapter = manager._files.read(request.adapter.source)
        weights = adapter.target.modules()["model.layers.1.mlp.down_proj"]
        torch.testing.assert_close(y, torch.ones(1, linear.in_features) @ weights.a.T @ weights.b)
        with pytest.raises(AdapterError, match="rank 9"):
            manager.catalog.load(LoRARequest("bad", path=folder("bad", rank=9)))
        mixed = LoRARequest("b", path=folder("b"))
        manager.catalog.load(mixed)
        assert reader.num_answers == 3
        os.kill(reader.pid, signal.SIGKILL)
        manager.catalog.load(LoRARequest("c", path=folder("c")))
        manager.catalog.unload("a")
        manager.forget(request)
        manager.catalog.unload("b")
        del adapter, weights, request
        assert mapped() == before, "unloading gives the memory back"
        manager.check_integrity()
    finally:
        manager.close()
    assert reader.pid is None
