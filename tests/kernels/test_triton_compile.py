"""Every kernel has cases that compile without a GPU, spill no registers and fit into shared memory."""

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def compile_kernels(repo_root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the tool by itself: in this process Triton may be its interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(repo_root / "tools" / "compile_kernels.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=repo_root)


@pytest.mark.slow
def test_a_case_of_each_kernel_of_some_ops_compiles(repo_root: Path, tmp_path: Path) -> None:
    """For Hopper. `make kernels` compiles every case of every op, which takes minutes of a core."""
    ops = ["act_and_mul", "rms_norm", "noise"]
    options = ["--arch", "90", "--one-each", "--only", *ops, "--json", str(tmp_path / "usage.json")]
    result = compile_kernels(repo_root, *options)
    assert result.returncode == 0, result.stdout + result.stderr
    usages = json.loads((tmp_path / "usage.json").read_text())
    assert len(usages) == sum(name.partition("/")[0] in ops for name in launched_kernels(repo_root))
    assert {usage["name"].split()[0] for usage in usages} == set(ops)  # a case's name begins with its op
    assert all(usage["registers"] > 0 for usage in usages)


def launched_kernels(repo_root: Path) -> set[str]:
    """Such as "noise/triton.py _argmax_kernel"; functions that only kernels call are not called so."""
    found = set()
    for path in (repo_root / "kernels").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("kernel"):
                assert any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list), node.name
                found.add(f"{path.parent.name}/{path.name} {node.name}")
    return found


def test_every_kernel_has_cases_for_every_architecture(repo_root: Path) -> None:
    archs: dict[str, set[int]] = {}
    for path in (repo_root / "kernels").glob("*/triton.py"):
        module = importlib.import_module(f"outrider.kernels.{path.parent.name}.triton")
        for case in module.compile_cases():
            function = case.kernel.fn
            file = function.__module__.rpartition(".")[2]
            archs.setdefault(f"{path.parent.name}/{file}.py {function.__name__}", set()).update(case.archs)
    assert archs == {kernel: {80, 90, 100} for kernel in launched_kernels(repo_root)}


def test_spills_and_compile_errors_are_reported(repo_root: Path) -> None:
    code = """if True:
        import sys
        sys.path.insert(0, "tools")
        import compile_kernels as tool
        (case,) = tool.find_cases(["rms_norm bf16 w16384 residual"]).values()
        for changed in (case, case._replace(num_warps=1), case._replace(constexprs={})):
            print(tool.compile_case(changed, 90).error)
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, cwd=repo_root)
    fine, spilled, wrong = result.stdout.splitlines()
    assert fine == ""
    assert "spills to" in spilled
    assert "constexprs must be" in wrong


def test_the_interpreter_compiles_nothing_and_is_refused(repo_root: Path) -> None:
    command = [sys.executable, str(repo_root / "tools" / "compile_kernels.py")]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=repo_root)
    assert result.returncode == 2
    assert "TRITON_INTERPRET" in result.stderr
