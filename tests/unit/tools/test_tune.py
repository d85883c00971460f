"""`tools/tune` without the timing, and the option that uses its files."""

import os
from pathlib import Path

import pytest
import torch

from outrider.kernels.tuning import VARIABLE, DeviceName, KernelConfigError
from outrider.kernels.tuning.files import ConfigEntry, ConfigFile, Times, read_configs
from outrider.models.demo import demo_model_path
from outrider.platform.cli import serve
from outrider.platform.cli.main import build_parser, main
from outrider.platform.core.errors import InvalidRequestError, OutriderError
from outrider.tools.tune import command as tune


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    assert tune.main(["--model", str(demo_model_path()), "--output", str(tmp_path / "out")]) == 1
    assert "tuning measures the kernels on a CUDA device, and there is none" in one_line(capsys)
    assert not (tmp_path / "out").exists()


def test_a_missing_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    assert tune.main(["--output", "out", "--model", "/nowhere/at/all"]) == 1
    assert "/nowhere/at/all" in one_line(capsys)


@pytest.mark.parametrize(
    "options", [["--output", "x"], ["--model", "m"], ["--model", "m", "--output", "x", "--budget-seconds", "0"]]
)
def test_wrong_usage(options: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        tune.main(options)
    assert raised.value.code == 2


def test_a_models_sizes_are_its_configs() -> None:
    pytest.importorskip("triton")
    assert tune.model_shape(str(demo_model_path())) == (256, 512, 8, 4, 32, 2048, torch.bfloat16)


def fewest_warps(run: object) -> float:
    """Time by the number of warps: fewer are faster."""
    from outrider.kernels.tuning import configs_of
    from outrider.kernels.tuning.configs import RMSNormConfig

    return configs_of(torch.device("cpu")).get(RMSNormConfig(16, 4), 64, 2).num_warps * 1e-6


def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels on the CPU need the interpreter")
    from outrider.tools.tune import search
    from outrider.tools.tune.workloads import ModelShape, WorkSizes

    monkeypatch.setattr(search, "SPACES", {"rms_norm": search.SPACES["rms_norm"]})
    model = ModelShape(64, 96, 4, 2, 16, 301, torch.float16)
    searcher = search.Searcher(torch.device("cpu"), 90, fewest_warps)
    tune.tune_model(model, DeviceName("cpu", (0, 0)), searcher, folder, WorkSizes(rows=(3,), logits=(2,)))


def test_a_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, monkeypatch)
    header, line = capsys.readouterr().out.splitlines()
    assert "1 shapes, 0 kept" in header
    assert line.startswith("rms_norm (64, 2): 4.0 to 1.0 µs, RMSNormConfig(")
    assert "num_warps=1" in line
    file = read_configs(tmp_path / "cpu.json")
    assert [(key, entry.config.num_warps) for key, entry in file.entries.items()] == [(("rms_norm", (64, 2)), 1)]
    run(tmp_path, monkeypatch)
    assert "1 shapes, 1 kept" in capsys.readouterr().out
    assert read_configs(tmp_path / "cpu.json") == file


def test_measurements_of_another_compiler_are_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from outrider.kernels.tuning.configs import ActAndMulConfig

    entry = ConfigEntry(ActAndMulConfig(64, 1), {"w": Times(2.0, 1.0)})
    ConfigFile(DeviceName("cpu", (0, 0)), "1.0", "2026-01-31", {("act_and_mul", (128, 2)): entry}).write(
        tmp_path / "cpu.json"
    )
    run(tmp_path, monkeypatch)
    assert "cpu.json is of another device or Triton: started over" in capsys.readouterr().out
    assert {kernel for kernel, _ in read_configs(tmp_path / "cpu.json").entries} == {"rms_norm"}


def test_a_broken_file_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.json").write_text("{}")
    with pytest.raises(OutriderError, match=r"--output: .*cpu.json: version: must be 1, got None; move it away"):
        run(tmp_path, monkeypatch)
    assert (tmp_path / "cpu.json").read_text() == "{}"


def served(*options: str) -> None:
    namespace = build_parser().parse_args(["serve", *options])
    serve.use_kernel_configs(namespace.kernel_configs)


def test_the_server_hands_the_files_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    ConfigFile(DeviceName("x", (9, 0)), "3.6.0", "2026-01-31").write(tmp_path / "x.json")
    served()
    assert os.environ[VARIABLE] == ""
    monkeypatch.chdir(tmp_path)
    served("--kernel-configs", ".")
    assert os.environ[VARIABLE] == str(tmp_path)


@pytest.mark.parametrize("by_variable", [False, True])
def test_the_server_refuses_broken_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], by_variable: bool
) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"version": 7}')
    monkeypatch.setenv(VARIABLE, str(path) if by_variable else "")
    with pytest.raises(InvalidRequestError, match=r"x.json: version: must be 1, got 7") as raised:
        served(*([] if by_variable else ["--kernel-configs", str(path)]))
    assert raised.value.param == "kernel_configs"
    assert isinstance(raised.value.__cause__, KernelConfigError)
    with pytest.raises(SystemExit):
        main(["serve", *([] if by_variable else ["--kernel-configs", str(path)])])
    assert "argument --kernel-configs: " in capsys.readouterr().err
