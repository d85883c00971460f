"""The checkout is the package `outrider`, and breaks nothing else."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import fastapi
import httpx
import pytest
import torch
from hypothesis import settings

import outrider
from outrider.platform.core import errors as error_module

# Folders of the root that are no part of the package.
NOT_PACKAGED = {"benchmarks", "build", "dist", "docs", "examples", "tests", "tools"}


PIP = ("-m", "pip", "--disable-pip-version-check")


def clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}


def run(*arguments: object, cwd: Path) -> str:
    """Output of a fresh interpreter whose import path begins with its working directory."""
    command, environment = [sys.executable, *map(str, arguments)], clean_environment()
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def run_python(code: str, cwd: Path) -> str:
    return run("-c", code, cwd=cwd)


def package_folders(root: Path) -> set[str]:
    """Dotted names of all folders below the root that hold Python code of the package, the root's included."""
    names = set()
    for folder, subfolders, files in os.walk(root):
        skipped = NOT_PACKAGED if Path(folder) == root else {"__pycache__"}
        subfolders[:] = [s for s in subfolders if not s.startswith(".") and s not in skipped]
        if any(file.endswith(".py") for file in files):
            names.add(".".join(("outrider", *Path(folder).relative_to(root).parts)))
    return names


@pytest.fixture(scope="module")
def pyproject(repo_root: Path) -> dict:
    return tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built offline from an sdist, which is built from links, so that the checkout stays as it is."""
    source = tmp_path_factory.mktemp("source")
    for entry in repo_root.iterdir():
        if entry.name.startswith(".") or entry.name.endswith(".egg-info") or entry.name in NOT_PACKAGED:
            continue
        if entry.is_dir():
            (source / entry.name).symlink_to(entry)
        else:
            shutil.copy(entry, source)
    target = tmp_path_factory.mktemp("wheel")
    run("-c", f"from setuptools import build_meta; build_meta.build_sdist({str(target)!r})", cwd=source)
    (sdist,) = target.glob("outrider-*.tar.gz")
    run(*PIP, "wheel", sdist, "--wheel-dir", target, "--no-deps", "--no-build-isolation", "--no-index", cwd=target)
    (wheel,) = target.glob("outrider-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel_files(wheel: Path) -> set[str]:
    """Paths inside the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_standard_library_works_at_the_root(repo_root):
    code = "import sys; assert sys.path[0] == ''; import platform, uuid; uuid.uuid4(); print(platform.python_version())"
    assert run_python(code, repo_root) == ".".join(map(str, sys.version_info[:3]))


def test_guard_leaves_the_real_module_and_nothing_else(repo_root):
    code = "import platform; print(platform.__file__, *sorted(vars(platform)))"
    assert run_python(code, repo_root) == run_python(code, repo_root / "tests")


def test_guard_leaves_our_package_alone(repo_root):
    code = "import outrider.platform as p, platform; print(p.__file__); assert p is not platform; print(*vars(p))"
    file, names = run_python(code, repo_root).splitlines()
    assert Path(file) == repo_root / "platform" / "__init__.py"
    assert all(name.startswith("__") or (repo_root / "platform" / name).is_dir() for name in names.split())


def test_pytest_did_not_import_the_root_again(repo_root):
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    assert [name for name, file in files.items() if file == str(repo_root / "__init__.py")] == ["outrider"]


def test_examples_may_take_long():
    """The profile of the tests' `conftest.py` holds for every file: a busy machine fails no property."""
    assert settings().deadline is None


def test_every_package_folder_is_listed(repo_root, pyproject):
    listed = pyproject["tool"]["setuptools"]["packages"]
    assert listed == sorted(listed)
    assert set(listed) == package_folders(repo_root)


def test_every_package_folder_has_an_init(repo_root, pyproject):
    folders = [Path(*name.split(".")[1:]) for name in pyproject["tool"]["setuptools"]["packages"]]
    assert [str(folder) for folder in folders if not (repo_root / folder / "__init__.py").is_file()] == []


@pytest.mark.slow
def test_wheel_holds_every_module(repo_root, pyproject, wheel_files):
    expected = {"outrider/py.typed"}
    for name in pyproject["tool"]["setuptools"]["packages"]:
        folder = repo_root.joinpath(*name.split(".")[1:])
        expected |= {f"outrider/{file.relative_to(repo_root).as_posix()}" for file in folder.glob("*.py")}
    assert expected - wheel_files == set()


@pytest.mark.slow
def test_wheel_holds_the_native_kernels(repo_root, wheel_files):
    sources = [file for kind in ("*.cpp", "*.h") for file in (repo_root / "kernels").rglob(kind)]
    assert sources
    assert {f"outrider/{file.relative_to(repo_root).as_posix()}" for file in sources} - wheel_files == set()


@pytest.mark.slow
def test_wheel_holds_the_demo_model(repo_root, wheel_files):
    demo = repo_root / "models" / "demo"
    folders = [demo / name for name in ("base", "draft", "eagle3", "adapters")]
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    if not files:
        pytest.skip("the demo model is not in this checkout")
    files.append(demo / "MODEL_CARD.md")
    assert {f"outrider/{file.relative_to(repo_root).as_posix()}" for file in files} - wheel_files == set()


@pytest.mark.slow
def test_wheel_holds_the_console(repo_root, wheel_files):
    files = [file for file in (repo_root / "platform/http/console/static").rglob("*") if file.is_file()]
    assert {f"outrider/{file.relative_to(repo_root).as_posix()}" for file in files} - wheel_files == set()


@pytest.mark.slow
def test_wheel_holds_nothing_else_of_the_root(wheel_files):
    inside = [name.split("/")[1:] for name in wheel_files if name.startswith("outrider/")]
    assert {path[0] for path in inside if len(path) == 1} == {"__init__.py", "py.typed"}
    assert {path[0] for path in inside if len(path) > 1} & NOT_PACKAGED == set()
    assert {name.split("/")[0] for name in wheel_files if ".dist-info/" not in name} == {"outrider"}


@pytest.mark.slow
def test_the_wheel_has_the_packages_version(wheel_files):
    assert f"outrider-{outrider.__version__}.dist-info/METADATA" in wheel_files


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a clean environment with the wheel, which sees this one's packages except the checkout."""
    folder = tmp_path_factory.mktemp("environment")
    run("-m", "venv", "--without-pip", folder, cwd=folder)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    packages = {str(Path(module.__file__).parents[1]) for module in (torch, fastapi)}
    # The lines of a .pth file inside these folders, such as those of the checkout, have no effect.
    (site_packages / "shared.pth").write_text("\n".join(packages))
    python = folder / "bin" / "python"
    run(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    return folder / "bin" / "outrider"


@pytest.mark.slow
def test_an_installed_wheel_serves_the_demo_from_an_empty_folder(installed, tethered, tmp_path):
    """The wheel comes from the sdist alone: neither needs make, and the sdist has all that a build needs."""
    place = "import outrider; print(outrider.__file__)"
    command, environment = [installed.with_name("python"), "-c", place], clean_environment()
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(installed.parents[1])
    server = subprocess.Popen(
        tethered([installed, "serve", "--port", "0"]),
        cwd=tmp_path,
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output, ready = [], None
    for line in server.stdout:
        output.append(line)
        if ready := re.search(r"Outrider is ready on (http://\S+)", line):
            break
    assert ready, "".join(output)
    body = {"messages": [{"role": "user", "content": "What is the capital of Portugal?"}], "temperature": 0}
    with httpx.Client(base_url=ready[1], timeout=60, verify=False) as http:
        body["model"] = http.get("/v1/models").json()["data"][0]["id"]
        answer = http.post("/v1/chat/completions", json=body | {"max_tokens": 20}).raise_for_status().json()
    assert "Lisbon" in answer["choices"][0]["message"]["content"]
    server.terminate()
    server.communicate(timeout=60)
    assert server.returncode == 0


def test_public_names_are_listed_and_unknown_ones_refused():
    assert {"LLM", "AsyncLLM", "SamplingParams", "LoRARequest"} <= set(dir(outrider))
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = outrider.Nonsense


@pytest.mark.parametrize("code", ["import outrider", "import outrider.platform.core"])
def test_import_is_light(code, tmp_path):
    heavy = "torch numpy transformers fastapi pydantic zmq uvicorn triton".split()
    assert run_python(f"{code}; import sys; print(*sys.modules.keys() & {set(heavy)})", tmp_path) == ""


def test_core_modules_import_no_torch(repo_root, tmp_path):
    modules = [
        f"outrider.platform.core.{p.stem}" for p in (repo_root / "platform/core").glob("*.py") if p.stem[0] != "_"
    ]
    code = f"import importlib, sys; [importlib.import_module(m) for m in {modules}]; print('torch' in sys.modules)"
    assert run_python(code, tmp_path) == "False"


@pytest.mark.slow
def test_public_names_need_no_web_stack(tmp_path):
    """All but AsyncLLM, which speaks to its engine process."""
    web = "fastapi pydantic starlette uvicorn zmq msgspec prometheus_client sqlalchemy".split()
    names = ", ".join(sorted({*outrider.__all__} - {"AsyncLLM", "AsyncLLMEngine", "__version__"}))
    code = f"from outrider import {names}; import sys; print(*sys.modules.keys() & {set(web)})"
    assert run_python(code, tmp_path) == ""
    light = "from outrider import AdapterInfo, EngineArgs, OutriderError; import sys; print('torch' in sys.modules)"
    assert run_python(light, tmp_path) == "False"


def test_every_error_for_users_is_public():
    errors = {
        name
        for name, value in vars(error_module).items()
        if getattr(value, "__module__", "") == error_module.__name__
        and isinstance(value, type)
        and issubclass(value, outrider.OutriderError)
    }
    assert errors
    assert errors <= {*outrider.__all__}
    for name in errors:
        assert getattr(outrider, name) is getattr(error_module, name)
