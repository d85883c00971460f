"""The machine, code, command and model of a result."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from .... import __version__
from ...core.messages import EngineInfo

INFLATION_FILE = "inflation.json"
"""File beside a model, written by `benchmarks/inflate.py`: the model that it was made from."""
RANDOM_WEIGHTS = "random_weights"
"""Key of a model's config.json: true when it was never trained. Written by `benchmarks/lora_models.py`."""
_FOLDERS = re.compile(r"(?<![^\s=:,])/(?:[^/\s=:,]+/)*(?=[^/\s=:,])")
"""Folders of an absolute path."""


def describe_machine() -> dict[str, Any]:
    """Date, commit, command, processor, memory and versions, for the head of a result file."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "command": command_line(sys.argv),
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "amx": any(line.startswith("flags") and "amx_tile" in line for line in lines),
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
    """The commit of the running checkout, with "+changes" where files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+changes", "--abbrev=12", "--exclude=*"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() or None


def describe_model(info: EngineInfo, path: Path) -> dict[str, Any]:
    """Facts about the measured model; `path` is the model's folder."""
    described: dict[str, Any] = {
        "architecture": info.architecture,
        "dtype": info.dtype,
        "device": info.device,
        "num_parameters": info.num_parameters,
    }
    if (path / INFLATION_FILE).is_file():
        described["inflated_from"] = json.loads((path / INFLATION_FILE).read_text(encoding="utf-8")).get("source")
    return described
