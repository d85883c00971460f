"""A training run with TRL, whose rollouts come from a real server of a small real model.

The tests run with TRL's Python, in which this package is not installed: `make test-rl`. The server runs with its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))

from running_server import PYTHON, ROOT, running_server

HERE = Path(__file__).resolve().parent
BASE = "policy-base"
STEPS, ALL_STEPS = 20, 50
"""Steps of the run, without and with `--all`: some five seconds each on two cores."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help=f"{ALL_STEPS} steps instead of {STEPS}")


@dataclass(frozen=True)
class Run:
    """A training run: a line of TRL's metrics for each step, and what the server said before and after it."""

    steps: list[dict[str, Any]]
    texts: tuple[str, str]
    """Greedy text of the base model, before and after."""
    models: list[str]
    metrics: str


def call(url: str, body: dict[str, Any] | None = None) -> bytes:
    """Body of the answer to a GET, or to a POST of JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read()


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of `train.py`, or a skip if no package index has the model."""
    made = subprocess.run([PYTHON, str(ROOT / "tools/real_models.py")], stdout=subprocess.PIPE, text=True, timeout=600)
    if made.returncode:
        pytest.skip("no package index has the model")
    model, folder = made.stdout.strip(), tmp_path_factory.mktemp("run")
    steps = ALL_STEPS if request.config.getoption("--all") else STEPS
    options = [model, "--served-model-name", BASE, "--dtype", "float32", "--max-model-len", "512"]
    options += ["--lora-root", str(folder), "--enable-lora", "--max-loras", "4", "--max-lora-rank", "8"]
    with running_server(*options, folder=folder) as url:
        question = {"model": BASE, "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
        before = json.loads(call(f"{url}/v1/completions", question))["choices"][0]["text"]
        command = [sys.executable, str(HERE / "train.py"), "--model", model, "--server", url, "--steps", str(steps)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}
        trained = subprocess.run(
            [*command, "--output-dir", str(folder)], env=environment, stdout=subprocess.PIPE, text=True, timeout=900
        )
        assert trained.returncode == 0, trained.stdout
        lines = [json.loads(line) for line in trained.stdout.splitlines() if line.startswith('{"step"')]
        after = json.loads(call(f"{url}/v1/completions", question))["choices"][0]["text"]
        models = [card["id"] for card in json.loads(call(f"{url}/v1/models"))["data"]]
        metrics = call(f"{url}/metrics").decode()
    assert len(lines) > steps  # the last one sums the run up
    return Run(lines[:steps], (before, after), models, metrics)
