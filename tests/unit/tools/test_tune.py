"""`tools/tune` without the timing, and the option that uses what it writes."""

import json
import os
from pathlib import Path

import pytest
import torch

from outrider.kernels.tuning import VARIABLE, DeviceName, KernelConfigError
from outrider.kernels.tuning.files import ConfigEntry, ConfigFile, Times, read_configs
from outrider.platform.cli import serve
from outrider.platform.cli.main import build_parser, main
from outrider.platform.core.errors import InvalidRequestError, OutriderError
from outrider.tools.tune import command as tune
from outrider.tools.tune.shapes import MODELS, ModelShape, WorkSizes

TINY = ModelShape(64, 96, 4, 2, 16, 301, "float16")
SIZES = WorkSizes(rows=(3,), logits=(2,))


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["--shapes", "llama3-8b", "--output", str(tmp_path / "out")]) == 1
    assert "tuning measures the kernels on a CUDA device, and there is none" in one_line(capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shapes", "llama3-8b,gpt5"], "--shapes: there is no 'gpt5', but llama3-8b, "),
        (["--shapes", "llama3-8b", "--kernels", "silu_mul,gemm"], "--kernels: there is no 'gemm', but attention, "),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_what_is_unknown_is_named(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["--output", "out", *options]) == 1
    assert message in one_line(capsys)


@pytest.mark.parametrize(
    "options",
    [
        ["--output", "x"],
        ["--shapes", "llama3-8b"],
        ["--model", "m", "--shapes", "llama3-8b", "--output", "x"],
        ["--shapes", "llama3-8b", "--output", "x", "--budget-seconds", "0"],
    ],
)
def test_wrong_usage(options: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        tune.main(options)
    assert raised.value.code == 2


def test_a_models_sizes_are_its_configs(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert tune.model_shape(str(tmp_path)) == MODELS["llama3-8b"]
    assert MODELS["llama3-8b"].dtype is torch.bfloat16


class Timer:
    """Fewer warps are faster."""

    def seconds(self, workload: object) -> float:
        from outrider.kernels.tuning import configs_of
        from outrider.kernels.tuning.configs import RMSNormConfig

        return configs_of(torch.device("cpu")).get(RMSNormConfig(16, 4), 64, 2).num_warps * 1e-6


def run(folder: Path, kernels: list[str]) -> int:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels on the CPU need the interpreter")
    return tune.tune_models({"tiny": TINY}, kernels, torch.device("cpu"), Timer(), folder, None, SIZES)


def test_a_file_and_a_table_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, ["rms_norm"]) == 0
    out = capsys.readouterr().out
    assert "1 shapes of 1 kernels" in out
    header, line = out.splitlines()[1:3]
    assert header.split()[:2] == ["kernel", "shape"]
    assert line.split()[:3] == ["rms_norm", "width=64", "itemsize=2"]
    assert "4.0" in line
    assert "4.00x" in line
    assert "num_warps=1" in line
    file = read_configs(tmp_path / "cpu.json")
    assert [(key, entry.config.num_warps) for key, entry in file.entries.items()] == [(("rms_norm", (64, 2)), 1)]


def test_the_same_command_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, ["rms_norm"])
    capsys.readouterr()
    run(tmp_path, ["rms_norm", "silu_mul"])
    assert "1 of 2 shapes searched, 1 kept from before" in capsys.readouterr().out
    assert {kernel for kernel, _ in read_configs(tmp_path / "cpu.json").entries} == {"rms_norm", "silu_mul"}


def test_what_another_compiler_was_measured_with_is_begun_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from outrider.kernels.tuning.configs import SiluMulConfig

    entry = ConfigEntry(SiluMulConfig(64, 1), {"w": Times(2.0, 1.0)})
    ConfigFile(DeviceName("cpu", (0, 0)), "1.0", "2026-01-31", {("silu_mul", (128, 2)): entry}).write(
        tmp_path / "cpu.json"
    )
    run(tmp_path, ["rms_norm"])
    assert "cpu.json is of another device or Triton: begun anew" in capsys.readouterr().out
    assert {kernel for kernel, _ in read_configs(tmp_path / "cpu.json").entries} == {"rms_norm"}


def test_a_broken_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "cpu.json").write_text("{}")
    with pytest.raises(OutriderError, match=r"--output: .*cpu.json: version: must be 1, got None; move it away"):
        run(tmp_path, ["rms_norm"])
    assert (tmp_path / "cpu.json").read_text() == "{}"


def served(*options: str) -> None:
    namespace = build_parser().parse_args(["serve", *options])
    serve.use_kernel_configs(namespace)


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
