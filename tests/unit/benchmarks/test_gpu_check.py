"""The GPU check's frame, and those of its sections that a CPU runs, on tiny shapes."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

pytestmark = pytest.mark.slow

MODES = ("off", "ngram")
LIMIT = 600
"""Seconds after which a machine with a GPU ends a command."""
FAKE_PLAN = """
import os, sys, time
from gpu.plan import Entry

class Fake(Entry):
    def work(self, root, shapes):
        return globals()[self.function]

def good(context):
    context.ceilings["copy_bytes"] = 2.0
    context.row("answer", value=42)

def reads(context):
    context.row("bytes", value=context.ceilings["copy_bytes"], unknown=context.ceilings["flops"])

def raises(context):
    context.row("before", passed=True)
    raise ValueError("out of luck")

def wrong(context):
    context.row("text", passed=False)

def dies(context):
    context.row("before", value=1)
    os._exit(139)

def loses(context):  # ends as a process does that finds no device
    os._exit(2)

def hangs(context):
    context.row("before", value=1)
    time.sleep(600)

def time_left(context):
    context.row("left", seconds=context.seconds_left)

OTHERS = "good raises dies absent loses wrong reads time_left".split()
SECTIONS = [Fake("hangs", 4.0, "hangs"), *(Fake(name, 30.0, name) for name in OTHERS)]
GRACE = 0.5
"""


@pytest.fixture
def gpu(repo_root, monkeypatch):
    """Module of benchmarks/gpu by name."""
    monkeypatch.syspath_prepend(repo_root / "benchmarks")
    return lambda name: importlib.import_module(f"gpu.{name}")


@pytest.fixture
def run(gpu, tmp_path):
    """(name, work, seconds) -> the entry of a section that was run."""
    report = gpu("report")

    def run_section(name, work, seconds=60.0):
        report.Context(tmp_path, name, time.monotonic() + seconds, "cpu", True).run(work)
        return report.read(tmp_path)[name]

    return run_section


# --- The frame ----------------------------------------------------------------------------------------------


@pytest.fixture
def check(repo_root, tmp_path):
    """Starts the check with the sections above."""
    (tmp_path / "fake_plan.py").write_text(FAKE_PLAN)

    def start(*arguments):
        command = [sys.executable, str(repo_root / "benchmarks" / "gpu_check.py"), str(tmp_path / "out")]
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        return subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
            cwd=tmp_path,
        )  # fmt: skip

    return start


def test_a_section_that_fails_dies_or_hangs_leaves_the_other_results(check, tmp_path):
    process = check("--device", "cpu", "--plan", "fake_plan")
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 1, output
    data = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    entries = data["sections"]
    assert list(entries) == ["hangs", "good", "raises", "dies", "absent", "loses", "wrong", "reads", "time_left"]
    rows = {name: [row["name"] for row in entry["rows"]] for name, entry in entries.items() if entry["rows"]}
    assert list(rows.values()) == [["before"], ["answer"], ["before"], ["before"], ["text"], ["bytes"], ["left"]]
    ends = {
        name: entry["traceback"].strip().splitlines()[-1] for name, entry in entries.items() if "traceback" in entry
    }
    assert ends.keys() == {"raises", "dies", "hangs", "absent", "loses"}
    assert (ends["raises"], ends["dies"]) == ("ValueError: out of luck", "its process ended with 139")
    assert (ends["absent"], ends["loses"]) == ("KeyError: 'absent'", "its process ended with 2")
    assert ends["hangs"].startswith("killed")
    assert entries["reads"]["rows"] == [{"name": "bytes", "value": 2.0}]  # what another process has measured
    assert data["failed"]
    shown = output[output.rindex("weights:") :]
    names = "hangs hangs good raises raises dies dies absent loses wrong reads time_left"
    assert [line.split()[0].rstrip(":") for line in shown.splitlines()[1:]] == names.split()
    assert all(json.loads((tmp_path / "out" / "sections" / f"{name}.json").read_text()) for name in entries)


def test_an_interrupted_run_prints_and_keeps_its_results(check, tmp_path):
    process = check("--device", "cpu", "--plan", "fake_plan", "--sections", "good,hangs", "--seconds", "500")
    path = tmp_path / "out" / "sections" / "hangs.json"
    deadline = time.monotonic() + 200
    while not (path.exists() and json.loads(path.read_text())["rows"]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 1
    assert output.rstrip().splitlines()[-1:] == ["hangs      before: value 1"]
    assert list(json.loads((tmp_path / "out" / "gpu_check.json").read_text())["sections"]) == ["hangs"]


def test_nothing_new_begins_after_a_sections_end(gpu, run, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow(context):
        for name in ("a", "b", "c"):
            if context.has_time(name, 4):
                now[0] += 5.0
                context.row(name, passed=True)

    rows = [(row["name"], "skipped" in row) for row in run("one", slow, 12.0)["rows"]]
    assert rows == [("a", False), ("b", False), ("c", True)]  # the third would end after 12 s
    assert [row["name"] for row in run("two", slow, -1.0)["rows"]] == ["everything"]


def test_unknown_sections_are_refused(check):
    output, _ = check("--device", "cpu", "--plan", "fake_plan", "--sections", "godo").communicate(timeout=200)
    assert "unknown sections godo; there are hangs, good, raises" in output


def test_the_boxes_fit_into_a_run_and_the_tests_come_first(gpu):
    plan = gpu("plan")
    boxes = [entry.seconds for entry in plan.SECTIONS if not entry.is_optional]
    assert plan.SECTIONS[0].name == "tests"
    assert sum(boxes) <= plan.SECONDS <= LIMIT - 3 * plan.GRACE
    for entry in plan.SECTIONS:
        assert callable(entry.work(None, plan.QUICK_SHAPES)), entry


def test_a_section_may_use_results_of_earlier_ones(check, tmp_path):
    process = check("--device", "cpu", "--plan", "fake_plan", "--sections", "good,time_left", "--seconds", "500")
    assert process.wait(200) == 0
    sections = json.loads((tmp_path / "out" / "gpu_check.json").read_text())["sections"]
    assert 300 < sections["time_left"]["rows"][0]["seconds"] < 500


BARE = """
import importlib.abc, sys

class Bare(importlib.abc.MetaPathFinder):
    REFUSED = set("fastapi pydantic uvicorn zmq msgspec starlette prometheus_client psutil rich sqlalchemy "
                  "alembic hypothesis openai schemathesis playwright scipy pytest_timeout xdist psycopg".split())

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.REFUSED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path[:] = [Bare(), *(finder for finder in sys.meta_path if "Editable" not in getattr(finder, "__name__", ""))]
"""


def test_a_bare_checkout_is_checked(check, tmp_path):
    """Nothing installed but torch and the like: not the project, not the web stack, no plug-ins of pytest. The large
    model needs no packages of a server."""
    (tmp_path / "sitecustomize.py").write_text(BARE)
    for missing in ("outrider", "fastapi"):
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-c", f"import {missing}"]
        assert subprocess.run(command, env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL, check=False).returncode
    process = check("--device", "cpu", "--quick", "--sections", "tests,parity,cpu-27m,spec-large,http")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    sections = json.loads((tmp_path / "out" / "gpu_check.json").read_text())["sections"]
    assert sections.keys() == {"tests", "ceilings", "parity", "cpu-27m", "spec-large", "http"}
    assert "passed" in sections["tests"]["rows"][0]["tests"]
    assert sum("passed" in row for row in sections["parity"]["rows"]) == 7
    rows = sections["cpu-27m"]["rows"]
    assert [row["name"] for row in rows] == ["tiny-llama x 1, two cores", "tiny-llama x 2, two cores"]
    assert all(row["tokens_per_second"] > 0 and row["adapters_over_base"] > 0 for row in rows)
    assert sections["http"]["rows"] == [{"name": "server", "skipped": "fastapi is not installed"}]
    assert "http       server: skipped (fastapi is not installed)" in output
    large = {row["name"]: row for row in sections["spec-large"]["rows"]}
    modes = ["eagle3", "prompt lookup", "draft model"]
    cells = [f"{mode}, {k} x {size}" for mode in modes for k in ("adaptive", "k = 4") for size in (1, 2)]
    assert all(large[cell]["times_faster"] > 0 and large[cell]["equal_texts"] == 1.0 for cell in cells)
    assert all(large[f"{mode}, k = 4 x 1"]["drafts_per_token"] > 0 for mode in modes)


def test_texts_that_batch_invariance_does_not_keep_are_counted(gpu, run, tmp_path, monkeypatch):
    """And fail the section: one text of the last run with `batch_invariant` is changed."""
    speculation = gpu("speculation")
    monkeypatch.setattr(speculation, "INVARIANT_MODES", {mode: speculation.INVARIANT_MODES[mode] for mode in MODES})
    complete, runs = speculation._complete, []

    def changed(*args):
        done = complete(*args)
        runs.append(done)
        if len(runs) == 4:
            done.requests[2].token_ids[5] += 1
        return done

    monkeypatch.setattr(speculation, "_complete", changed)
    rows = run("invariant", lambda context: speculation.count_differing(context, tmp_path))["rows"]
    names = [f"invariant, {mode} x {size}" for mode in MODES for size in (1, 4)]
    assert [row["name"] for row in rows] == [*names, "not invariant, off x 1", "not invariant, off x 4"]
    assert [(row["differ"], row["passed"], row["texts"]) for row in rows[:4]] == [(0, True, 8)] * 3 + [(1, False, 8)]
    assert [row["drafts"] > 0 for row in rows[:4]] == [False, False, True, True]
    assert all("passed" not in row for row in rows[4:])


# --- Sections -----------------------------------------------------------------------------------------------


def test_measured_copy_and_matmul_ceilings_are_positive(gpu, run):
    ceilings = run("ceilings", gpu("timing").measure_ceilings)["ceilings"]
    assert ceilings["copy_bytes"] > 0 < ceilings["matmul_flops"]


def test_the_kernel_table(gpu, run, device):
    """In Triton's interpreter if there is no GPU: each row's work gives finite numbers."""
    pytest.importorskip("triton")
    kernels = gpu("kernels")
    assert [row["skipped"] for row in run("kernels", kernels.measure_kernels)["rows"]] == ["kernels of GPUs alone"]
    cases = kernels.cases(True)
    assert len({case.work.name for case in cases}) == len(cases) == 14
    for case in cases:
        results = case.work.make(torch.device(device))() or ()
        assert case.work.name.startswith("penalties") or results
        assert all(result.isfinite().all() for result in results if not case.work.name.startswith("sampling"))


def test_the_bytes_of_a_case(gpu):
    pytest.importorskip("triton")
    kernels = gpu("kernels")
    long = kernels.attention(kernels.LLAMA_70B_HEADS, 64, 1, 4096)
    kv = 64 * 4096 * 8 * 128 * 2 * 2
    assert kv < long.num_bytes < 1.01 * kv
    assert long.flops == 0
    lora = list(kernels.adapters(kernels.LLAMA_8B, 64, 16, 64))[1]
    weights = 64 * 16 * 2 * 4096 * 2
    assert weights < lora.num_bytes < 1.2 * weights


def test_two_threads_of_one_core_are_not_two_cores(gpu, tmp_path, monkeypatch):
    processor = gpu("processor")
    monkeypatch.setattr(processor, "CORES", tmp_path)
    for cpu, siblings in enumerate(("0-1", "0-1", "2-3", "2-3")):
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert processor.separate_cores([0, 1, 2, 3], 2) == [0, 2]
    assert processor.separate_cores([1, 2, 4, 5], 3) == [1, 2, 4]  # nothing is known about 4


def test_shapes_have_the_published_sizes(gpu):
    models = gpu("models")
    assert models.LLAMA_8B.num_streamed + 128256 * 4096 == pytest.approx(8.03e9, rel=1e-3)
    assert models.LLAMA_8B.kv_bytes == 131072
    assert models.QWEN_06B.num_streamed == pytest.approx(0.596e9, rel=1e-2)


def test_ranks(gpu, run, tmp_path):
    divided, graphs = run("ranks", lambda c: gpu("ranks").check_ranks(c, tmp_path, gpu("models").TINY_QWEN))["rows"]
    assert divided["passed"]
    assert graphs["skipped"] == "they are a GPU's"


@pytest.mark.parametrize("shape", ["TINY", "TINY_QWEN"])
def test_engines_of_a_shape(gpu, run, tmp_path, shape):
    shape, end_to_end = getattr(gpu("models"), shape), gpu("end_to_end")

    def ceilings(context):
        context.ceilings |= {"copy_bytes": 1e9, "matmul_flops": 1e9}

    run("ceilings", ceilings)
    sections = {
        name: run(name, lambda context, name=name: getattr(end_to_end, f"measure_{name}")(context, tmp_path, shape))
        for name in ("model", "adapters", "graphs")
    }
    assert not any(map(gpu("report").has_failed, sections.values())), sections
    names = [row["name"].removeprefix(shape.name) for row in sections["model"]["rows"]]
    assert names == [" ready", " decode x 1", " decode x 2", " prompts 1 x 64"]
    assert [len(entry["rows"]) for entry in sections.values()] == [4, 2, 1]
    assert "skipped" in sections["graphs"]["rows"][0]


def test_a_server_under_load_compared_with_its_engine(gpu, run, tmp_path):
    shape = gpu("models").TINY
    entry = run("http", lambda context: gpu("serving").measure_serving(context, tmp_path, shape), 300.0)
    assert not gpu("report").has_failed(entry), entry
    rows = {row["name"]: row for row in entry["rows"]}
    cells = ["no adapters x 2 streams", "2 adapters x 2 streams"]
    names = ["server ready", "first requests of 2 adapters", *(f"HTTP, {cell}" for cell in cells)]
    assert list(rows) == [*names, "engine, first requests of 2 adapters", *(f"engine, {cell}" for cell in cells)]
    assert all(rows[f"HTTP, {cell}"]["ttft_p50_ms"] > 0 for cell in cells)
    assert all(rows[f"HTTP, {cell}"].keys() >= {"api_cores", "engine_cores"} for cell in cells)
    assert all(rows[f"engine, {cell}"]["http_over_engine"] > 0 for cell in cells)
