"""The GPU check's frame, and those of its sections that a CPU runs, on tiny shapes."""

import importlib
import json

import pytest


@pytest.fixture
def gpu(repo_root, monkeypatch):
    """Module of benchmarks/gpu by name."""
    monkeypatch.syspath_prepend(repo_root / "benchmarks")
    return lambda name: importlib.import_module(f"gpu.{name}")


@pytest.fixture
def report(gpu, tmp_path):
    return gpu("report").Report(tmp_path / "out", {"weights": "random"}, device="cpu", quick=True)


def written(report):
    return json.loads((report.folder / "gpu_check.json").read_text())


# --- The frame ----------------------------------------------------------------------------------------------


def test_a_failing_section_stops_nothing_and_is_told(gpu, report):
    section = gpu("report").Section

    def breaks(context):
        context.row("before", milliseconds=1.5)
        raise ValueError("out of luck")

    seen = []
    report.run([section("one", breaks, 10), section("two", lambda context: seen.append(written(report)), 10)], 10)
    sections = written(report)["sections"]
    assert sections["one"]["rows"] == [{"name": "before", "milliseconds": 1.5}]
    assert "out of luck" in sections["one"]["traceback"]
    assert list(seen[0]["sections"]) == ["one"]  # what there was before the second began
    assert report.failed
    assert report.table() == [
        "one        before: milliseconds 1.5",
        "one: FAILED: ValueError: out of luck",
    ]


def test_time_boxes(gpu, tmp_path):
    now = [0.0]
    report = gpu("report").Report(tmp_path, {}, device="cpu", quick=False, clock=lambda: now[0])
    section = gpu("report").Section

    def slow(context):
        for name in ("a", "b", "c"):
            if context.has_time(name, 4):
                now[0] += 5.0
                context.row(name, passed=True)

    report.run([section(name, slow, 12.0) for name in ("first", "second", "third")], 20.0)
    rows = {name: [(row["name"], "skipped" in row) for row in entry["rows"]] for name, entry in _sections(tmp_path)}
    assert rows["first"] == [("a", False), ("b", False), ("c", True)]  # 12 s: the third would end after them
    assert rows["second"] == [("a", False), ("b", False), ("c", True)]
    assert rows["third"] == [("everything", True)]
    assert not report.failed


def _sections(folder):
    return json.loads((folder / "gpu_check.json").read_text())["sections"].items()


def test_what_is_not_as_it_must_be_fails_the_run(report):
    report.add("x", {"name": "text", "passed": True})
    assert not report.failed
    report.add("x", {"name": "other text", "passed": False})
    assert report.failed
    assert report.table() == ["x          text: ok", "x          other text: FAILED"]


# --- Sections -----------------------------------------------------------------------------------------------


def test_the_kernel_table(gpu, report):
    section, kernels = gpu("report").Section, gpu("kernels")
    parts = [section("ceilings", gpu("timing").measure_ceilings, 60), section("kernels", kernels.measure_kernels, 60)]
    report.run(parts, 120)
    assert not report.failed
    assert report.ceilings["copy_bytes"] > 0 < report.ceilings["matmul_flops"]
    rows = written(report)["sections"]["kernels"]["rows"]
    assert len(rows) == len(kernels.cases(True))
    for case, row in zip(kernels.cases(True), rows, strict=True):
        assert ("skipped" in row) == case.triton_only
        assert case.triton_only or row["microseconds"] > 0 < row["percent_of_copy"]


def test_the_rows_of_a_gpu(gpu, device):
    """In Triton's interpreter where there is none."""
    pytest.importorskip("triton")
    for case in gpu("kernels").cases(True):
        if case.triton_only:
            case.make(device)()


def test_the_bytes_of_a_case(gpu):
    kernels = gpu("kernels")
    long = kernels.attention(1, [4096] * 64, 64, 8)
    kv = 64 * 4096 * 8 * 128 * 2 * 2
    assert kv < long.num_bytes < 1.01 * kv
    assert long.flops == 0
    lora = kernels.adapters(64, 16, 4096, [4096], distinct=True)
    weights = 64 * 16 * 2 * 4096 * 2
    assert weights < lora.num_bytes < 1.2 * weights


def test_shapes_have_the_published_sizes(gpu):
    models = gpu("models")
    assert models.LLAMA_8B.num_streamed + 128256 * 4096 == pytest.approx(8.03e9, rel=1e-3)
    assert models.LLAMA_8B.kv_bytes == 131072
    assert models.QWEN_06B.num_streamed == pytest.approx(0.596e9, rel=1e-2)


@pytest.mark.parametrize("shape", ["TINY", "TINY_QWEN"])
def test_engines_of_a_shape(gpu, report, tmp_path, shape):
    shape, section, end_to_end = getattr(gpu("models"), shape), gpu("report").Section, gpu("end_to_end")
    report.ceilings = {"copy_bytes": 1e9, "matmul_flops": 1e9}
    report.run(
        [
            section("model", lambda context: end_to_end.measure_model(context, tmp_path, shape), 60),
            section("lora", lambda context: end_to_end.measure_adapters(context, tmp_path, shape), 60),
            section("graphs", lambda context: end_to_end.measure_graphs(context, tmp_path, shape), 60),
        ],
        180,
    )
    sections = written(report)["sections"]
    assert not report.failed, sections
    names = [row["name"].removeprefix(shape.name) for row in sections["model"]["rows"]]
    assert names == [" ready", " decode x 1", " decode x 2", " prompts 1 x 64"]
    assert [len(entry["rows"]) for entry in sections.values()] == [4, 2, 1]
    assert "skipped" in sections["graphs"]["rows"][0]
