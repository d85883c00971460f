"""Checks for every device: the CPU's text, equal text with every drafter, and the tests of the kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from outrider import LoRARequest, SamplingParams
from outrider.models.demo import demo_adapters, demo_draft_path, demo_eagle3_path, demo_model_path
from outrider.platform.core.batch import StepPlan
from outrider.platform.core.messages import EngineRequest
from outrider.platform.engine.engine_core import EngineCore
from outrider.platform.engine.runner.model_runner import Launched

from .load import generate, random_prompt
from .models import TINY, running
from .report import Context

IN_TURN = ", one step after the other"
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=48, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, seed=5, top_p=0.9, max_tokens=48, ignore_eos=True),
}


def check_parity(context: Context, root: Path) -> None:
    """Check that float32 text on the device equals the CPU's, with and without speculation."""
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts = [*(random_prompt(40, TINY.vocab, seed) for seed in range(3)), [5, 6, 7, 8] * 12]
    path = TINY.write(root)
    options = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}
    with running(path, "cpu", **options) as engine:
        want = {name: generate(engine, prompts, params) for name, params in PARAMS.items()}
    modes: dict[str, dict[str, Any] | None] = {
        "no drafter": None,
        "draft_model": {"method": "draft_model", "model": path, "num_speculative_tokens": 3},
        "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    }
    for mode, config in modes.items():
        if not context.has_time(mode, 3):
            continue
        with running(path, context.device, speculative_config=config, **options) as engine:
            for name, params in PARAMS.items():
                passed = generate(engine, prompts, params) == want[name]
                context.row(f"{name} text with {mode} is the CPU's", passed=passed)
    _check_short_cache(context, path, prompts, options)


def _check_short_cache(context: Context, path: str, prompts: Sequence[list[int]], options: dict[str, Any]) -> None:
    """Check that the prompts' log-probabilities with an fp8 cache are the CPU's, except for values that round
    differently."""
    if not context.has_time("fp8 cache", 3):
        return
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for device in ("cpu", context.device):
        with running(path, device, kv_cache_dtype="fp8", **options) as engine:
            found.append(_prompt_logprobs(engine, prompts, params))
    difference = max(abs(a - b) for a, b in zip(*found, strict=True))
    context.row("log-probabilities with an fp8 cache are the CPU's", passed=difference < 0.05, largest=difference)


def _prompt_logprobs(engine: EngineCore, prompts: Sequence[list[int]], params: SamplingParams) -> list[float]:
    found: dict[str, list[float]] = {}
    for index, prompt in enumerate(prompts):
        engine.add_request(EngineRequest(str(index), prompt, params))
    while engine.has_work():
        for delta in engine.step():
            if delta.prompt_logprobs is not None:
                found[delta.request_id] = [entry.logprobs[0] for entry in delta.prompt_logprobs if entry]
    return [value for index in range(len(prompts)) for value in found[str(index)]]


def check_demo(context: Context, root: Path) -> None:
    """Check that float32 text of the demo model and its adapters on the device is equal with every drafter."""
    heads = {"draft_model": demo_draft_path(), "eagle3": demo_eagle3_path()}
    modes: dict[str, dict[str, Any]] = {name: {"method": name, "model": str(path)} for name, path in heads.items()}
    modes |= {"ngram": {"method": "ngram"}, "suffix": {"method": "suffix"}}
    if context.quick:
        modes = {"eagle3": modes["eagle3"]}
    modes |= {f"{name} k=4": mode | {"num_speculative_tokens": 4} for name, mode in modes.items()}
    # Steps that verify a network's drafts overlap, unless they may not: a fixed number of drafts, and the controller's.
    modes |= {f"{name}{IN_TURN}": modes[name] for name in ("eagle3", "eagle3 k=4")}
    adapters = [None, *(LoRARequest(name, path=str(path)) for name, path in demo_adapters().items())]
    prompts = [random_prompt(24, 2000, seed) for seed in range(4 if context.quick else 8)]
    options = {"dtype": "float32", "enable_lora": True, "max_model_len": 512, "max_num_seqs": 8, "load_format": "auto"}
    with running(str(demo_model_path()), context.device, **options) as engine:
        want = {name: generate(engine, prompts, params, adapters) for name, params in PARAMS.items()}
    for mode, config in modes.items():
        if not context.has_time(mode, 3):
            continue
        chosen = options | {"speculative_config": config, "async_scheduling": not mode.endswith(IN_TURN)}
        with running(str(demo_model_path()), context.device, **chosen) as engine:
            overlaps = _note_overlaps(engine)
            for name, params in PARAMS.items():
                overlaps.clear()
                started = time.perf_counter()
                texts = generate(engine, prompts, params, adapters)
                rate = sum(map(len, texts)) / (time.perf_counter() - started)
                values = {"overlapping": sum(overlaps) / len(overlaps), "steps": len(overlaps)}
                passed = texts == want[name]
                context.row(f"demo {name} text with {mode}", passed=passed, tokens_per_second=rate, **values)


def _note_overlaps(engine: EngineCore) -> list[bool]:
    """List that gets, for each step launched from now on, True when another step was in flight."""
    overlaps: list[bool] = []
    launch = engine._runner.launch

    def noted(plan: StepPlan, before: Launched | None = None) -> Launched:
        overlaps.append(before is not None)
        return launch(plan, before)

    engine._runner.launch = noted  # type: ignore[method-assign]
    return overlaps


def run_tests(context: Context) -> None:
    """Run the tests of the kernels and of graphs, on the GPU if there is one. Each file has a process, because after an
    illegal memory access everything that a process does on a GPU fails. Several run at once, because most of the time
    is spent compiling. Their output goes next to the results."""
    repo = Path(__file__).resolve().parent.parent.parent
    folder = context.folder / "kernel_tests"
    folder.mkdir(parents=True, exist_ok=True)
    waiting = kernel_tests(repo, quick=context.quick)
    workers = max(1, min(_TEST_WORKERS, (os.cpu_count() or 1) // 2))
    running: dict[Path, tuple[subprocess.Popen[bytes], float]] = {}
    while (waiting or running) and context.seconds_left > 0:
        while waiting and len(running) < workers:
            path = waiting.pop(0)
            running[path] = (_start_tests(repo, path, folder / f"{path.stem}.txt"), time.monotonic())
        for path, (process, started) in list(running.items()):
            code = process.poll()
            if code is not None:
                del running[path]
                values = {"seconds": time.monotonic() - started, **_outcome(folder / f"{path.stem}.txt")}
                context.row(path.stem, passed=code == 0, **values)
        time.sleep(0.05)
    for path, (process, _) in running.items():
        process.kill()
        process.wait()
        context.skip(f"the rest of {path.stem}", "no time left")
    for path in waiting:
        context.skip(path.stem, "no time left")


_TEST_WORKERS = 8
_QUICK_TEST = "test_triton_specialisations.py"
_LAST_TESTS = ("test_graphs_engine.py", "test_triton_compile.py")
"""The longest file, and the one that needs no GPU."""


def kernel_tests(repo: Path, *, quick: bool) -> list[Path]:
    """Files of tests in the order of their runs."""
    tests = repo / "tests" / "kernels"
    if quick:
        return [tests / _QUICK_TEST]
    found = sorted([*tests.glob("test_triton_*.py"), *tests.glob("test_graphs_*.py")])
    return sorted(found, key=lambda path: _LAST_TESTS.index(path.name) if path.name in _LAST_TESTS else -1)


def _start_tests(repo: Path, path: Path, log: Path) -> subprocess.Popen[bytes]:
    # The project's options need pytest plug-ins that a bare GPU machine lacks; plug-ins that are there are not loaded.
    options = ["-q", "-rfE", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, str(path)],
            cwd=repo,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def _outcome(log: Path) -> dict[str, str]:
    """Summary of pytest, such as "3 failed, 20 passed", and the failed tests."""
    text = log.read_text(encoding="utf-8", errors="replace")
    counts = re.findall(r"\b\d+ (?:passed|failed|skipped|errors?)\b", text)
    failed = re.findall(r"^(?:FAILED|ERROR) .*?::(\S+)", text, re.MULTILINE)
    return {"tests": ", ".join(dict.fromkeys(counts)) or "none"} | ({"failed": " ".join(failed)} if failed else {})
