"""The head of a result: machine, code, command and model, and what is not real about it."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from .... import __version__
from ....models.checkpoint.json_files import read_model_config
from ....models.demo import DEMO_MODEL_NAME
from ...core.errors import OutriderError
from ...core.messages import EngineInfo
from .bench_options import is_demo

INFLATION_FILE = "inflation.json"
"""File next to a model, written by `benchmarks/inflate.py`: the model that it was made from."""
RANDOM_WEIGHTS = "random_weights"
"""Key of a model's config.json: true when it was never trained. Written by `benchmarks/lora_models.py`."""
_FOLDERS = re.compile(r"(?<![^\s=:,])/(?:[^/\s=:,]+/)*(?=[^/\s=:,])")
"""Folders of an absolute path."""


def describe_machine() -> dict[str, Any]:
    """Date, commit, command, processor and its vector instructions, memory and versions: the head of a result."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "command": command_line(sys.argv),
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "amx": "amx_tile" in flags,
        "cpu_flags": sorted(flag for flag in flags if flag.startswith(("avx", "amx", "asimd", "sve", "bf16", "i8mm"))),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "outrider": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def command_line(arguments: list[str]) -> str:
    """The command. Absolute paths lose their folders, because results are published."""
    return " ".join(_FOLDERS.sub("", argument) for argument in arguments)


def _commit() -> str | None:
    """The commit of the running checkout, with "+changes" if files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+changes", "--abbrev=12", "--exclude=*"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() or None


def describe_model(given: str | None, info: EngineInfo) -> dict[str, Any]:
    """Facts about the measured model; `given` is the value of --model."""
    described: dict[str, Any] = {
        "name": DEMO_MODEL_NAME if is_demo(given) else "/".join(Path(str(given)).parts[-2:]),
        "architecture": info.architecture,
        "dtype": info.dtype,
        "device": info.device,
        "quantization": info.quantization,
        "num_parameters": info.num_parameters,
    }
    inflation = Path(info.model) / INFLATION_FILE
    if inflation.is_file():
        described["inflated_from"] = json.loads(inflation.read_text(encoding="utf-8")).get("source")
    return described


def has_random_weights(folder: Path) -> bool:
    """True when a model's config.json says that it was never trained."""
    try:
        return bool(read_model_config(folder).get(RANDOM_WEIGHTS))
    except OutriderError:
        return False


def labels(*, random_weights: bool, synthetic: Sequence[float] | None = None) -> list[str]:
    """Warnings that text or acceptance are not real: the first lines of every output."""
    found = []
    if synthetic is not None:
        rates = ", ".join(f"{rate:g}" for rate in synthetic)
        found.append(f"SYNTHETIC ACCEPTANCE ({rates}): drafts are accepted whatever they are; the text is meaningless")
    if random_weights:
        found.append("RANDOM WEIGHTS: text and acceptance are meaningless")
    return found


def headline(report: dict[str, Any]) -> str:
    """The model and the machine of a report in a line."""
    model, machine = report["model"], report["machine"]
    origin = f" (inflated from {model['inflated_from']})" if model.get("inflated_from") else ""
    return (
        f"{model['name']}{origin}, {model['num_parameters'] / 1e6:.3g}M parameters, {model['dtype']}, on "
        f"{machine['gpu'] or machine['cpu']}, threads: {machine['threads']}"
    )
