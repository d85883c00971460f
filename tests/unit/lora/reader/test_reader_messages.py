"""RequestQueue, and messages between an engine's process and its reader."""

import json
import os

import pytest
import torch

from outrider.lora import step_yield
from outrider.lora.device.layout import ModelLayout, RowLayout
from outrider.lora.files.folder import AdapterFiles
from outrider.lora.files.tensor_keys import ModelModules, ModuleShape
from outrider.lora.reader.reader_messages import Setup, describe, make_files
from outrider.lora.step_yield import CpuYielder, GilYielder, LongStepFlag


def test_files_are_read_the_same_way_on_the_other_side():
    layout = ModelLayout(RowLayout(torch.bfloat16), RowLayout(torch.bfloat16))
    layout.linears.reserve(["q", "k"], 24, [8, 40])
    layout.linears.reserve(["down"], 7, [3])
    layout.vocabulary.reserve(["lm_head"], 24, [100])
    shapes = {"q": ModuleShape(24, 8, is_base=bool), "lm_head": ModuleShape(24, 100, embedding=True)}
    drafter = ModelModules({}, ModelLayout(RowLayout(torch.bfloat16), RowLayout(torch.bfloat16)))
    files = AdapterFiles(ModelModules(shapes, layout), drafter, draft_method="eagle", max_rank=7)
    made = make_files(Setup(*json.loads(json.dumps(describe(1, files)))), None, all)
    assert (made.draft_method, made.max_rank, made.drafter.shapes) == ("eagle", 7, {})
    assert made.target.shapes == {"q": shapes["q"]._replace(is_base=all), "lm_head": shapes["lm_head"]}
    for mine, theirs in zip(layout, made.target.layout, strict=True):
        assert (mine.sites, mine.pieces, mine.width, mine.dtype) == (
            theirs.sites,
            theirs.pieces,
            theirs.width,
            theirs.dtype,
        )


class Clock:
    """Time that passes only during work or sleep."""

    def __init__(self, monkeypatch):
        self.now, self.slept = 100.0, []
        monkeypatch.setattr(step_yield.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(step_yield.time, "thread_time", lambda: self.now)
        monkeypatch.setattr(step_yield.time, "sleep", self.slept.append)


def set_load(monkeypatch, folder, runnable):
    """Let the machine have this many runnable threads."""
    (folder / "loadavg").write_text(f"0.20 0.18 12.12 {runnable}/80 11206\n")
    monkeypatch.setattr(step_yield, "_LOAD", folder / "loadavg")


def test_the_lock_is_given_up_now_and_then(monkeypatch):
    clock = Clock(monkeypatch)
    yielder = GilYielder()
    for _ in range(100):
        clock.now += 0.1e-3
        yielder()
    assert 10 <= len(clock.slept) <= 25


@pytest.mark.parametrize(
    ("runnable", "num_bytes", "ratio"), [(1, 0, 0), (2, 0, 0), (3, 0, 3), (30, 1, 3), (3, 1 << 30, 12)]
)
def test_the_reader_yields_its_core_when_steps_want_it(monkeypatch, tmp_path, runnable, num_bytes, ratio):
    clock = Clock(monkeypatch)
    monkeypatch.setattr(step_yield.os, "sched_getaffinity", lambda _: {0, 1})
    set_load(monkeypatch, tmp_path, runnable)
    yielder = CpuYielder()
    yielder.begin(num_bytes)
    for _ in range(100):
        clock.now += 0.1e-3
        yielder()
    assert sum(clock.slept) == pytest.approx(ratio * 10e-3, rel=0.1)


def test_runnable_processes_are_counted(monkeypatch, tmp_path):
    assert CpuYielder()._num_runnable() >= 1
    monkeypatch.setattr(step_yield, "_LOAD", tmp_path / "none")
    assert CpuYielder()._num_runnable() == 0


def test_long_steps_are_recognised():
    descriptor = LongStepFlag.create()
    here, there = LongStepFlag(descriptor), LongStepFlag(descriptor)
    os.close(descriptor)
    for counts, long in (
        ([1, 1], False),
        ([1, 24], True),
        ([24, 1], True),
        ([24], False),
        ([1, 5], False),
        ([], False),
    ):
        here.update(counts)
        assert there.is_set() == long


def test_long_steps_are_left_alone_but_not_for_ever(monkeypatch, tmp_path):
    clock = Clock(monkeypatch)
    monkeypatch.setattr(step_yield.os, "sched_getaffinity", lambda _: {0, 1})
    set_load(monkeypatch, tmp_path, 3)
    descriptor = LongStepFlag.create()
    flag = LongStepFlag(descriptor)
    os.close(descriptor)
    yielder = CpuYielder(flag)

    def waited():
        """In a turn, in addition to its usual pauses."""
        clock.slept.clear()
        clock.now += 1e-3
        yielder()
        return sum(clock.slept[1:])

    assert waited() == 0
    flag.update([24, 1])
    assert waited() == pytest.approx(0.05)
    assert waited() == 0, "the longest wait has passed"
    flag.update([1, 1])
    assert waited() == 0
    flag.update([24, 1])
    assert waited() == pytest.approx(0.05)
