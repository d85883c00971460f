"""Speculation on the demo model, grown to a large one that writes equal text: real acceptance at a real size."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider import LoRARequest, SamplingParams
from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.models.demo import demo_adapters, demo_draft_path, demo_eagle3_path, demo_model_path
from outrider.platform.cli.bench.engine_runs import Run
from outrider.platform.cli.bench.prompt_files import encode
from outrider.platform.cli.bench.prompts import DEMO_PROMPTS
from outrider.platform.cli.bench.request_figures import Round
from outrider.platform.engine.engine_core import EngineCore

from . import load
from .models import running
from .report import Context

SIZES = ("--hidden-size", "1024", "--layers", "28", "--intermediate-size", "4864", "--dtype", "bfloat16")
"""Sizes of the large model: four times the demo's hidden size, so that no weight is rounded; 0.5B parameters."""
MODES: dict[str, dict[str, Any] | None] = {
    "off": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 4},
    "adaptive": {"method": "eagle3"},
}


def grow(root: Path) -> Path:
    """Grow the demo model, its drafters and adapters into a new folder."""
    folder = root / "inflated"
    adapters = [str(path) for path in demo_adapters().values()]
    script = Path(__file__).resolve().parent.parent / "inflate.py"
    heads = ["--draft", str(demo_draft_path()), "--eagle3", str(demo_eagle3_path())]
    command = [sys.executable, str(script), str(demo_model_path()), str(folder), *SIZES, *heads]
    done = subprocess.run([*command, "--adapters", *adapters], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"inflate.py failed: {done.stdout}{done.stderr}")
    return folder


def demo_folders(context: Context, root: Path) -> dict[str, Path]:
    """Folders of the target, its drafters and its adapters; for a quick run the demo's own."""
    if context.quick:
        found = {"base": demo_model_path(), "draft_model": demo_draft_path(), "eagle3": demo_eagle3_path()}
        return found | {f"adapters/{name}": path for name, path in demo_adapters().items()}
    folder = grow(root)
    found = {"base": folder / "base", "draft_model": folder / "draft", "eagle3": folder / "eagle3"}
    return found | {f"adapters/{name}": folder / "adapters" / name for name in demo_adapters()}


def _tasks(folders: dict[str, Path]) -> list[tuple[list[int], LoRARequest | None]]:
    """Prompts of the base model and of each adapter in turn, in the chat template, with their adapters."""
    tokenizer = load_tokenizer(demo_model_path())
    names = [name for name in demo_adapters() if name in DEMO_PROMPTS]
    loras = {"base": None} | {name: LoRARequest(name, path=str(folders[f"adapters/{name}"])) for name in names}
    return [
        (encode(tokenizer, text, "prompts"), loras[name])
        for texts in zip(*(DEMO_PROMPTS[name] for name in loras), strict=True)
        for name, text in zip(loras, texts, strict=True)
    ]


def measure_speculation(context: Context, root: Path) -> None:
    """Measure output tokens a second and the acceptance of every drafter at 1 and 8 requests of four tenants, whose
    texts end by themselves."""
    folders = demo_folders(context, root)
    tasks = _tasks(folders)
    params = SamplingParams(temperature=0.0, max_tokens=8 if context.quick else 128)
    best: dict[int, float] = {}
    for mode, config in MODES.items():
        if not context.has_time(mode, 8):
            continue
        speculative = None
        if config is not None:
            name = "eagle3" if mode == "adaptive" else mode
            speculative = config | ({"model": str(folders[name])} if name in folders else {})
        options = {"load_format": "auto", "max_model_len": 512, "max_num_seqs": 8, "speculative_config": speculative}
        options |= {"enable_lora": True, "max_lora_rank": 64}
        with running(str(folders["base"]), context.device, **options) as engine:
            for rows in (1, 8):
                batch = tasks[: 4 if context.quick else 8 if rows == 1 else 32]
                _complete(engine, batch, params, rows)
                before = _counts(engine)
                done = _complete(engine, batch, params, rows)
                rate = sum(record.num_output_tokens for record in done.requests) / done.seconds
                drafted, accepted = (now - then for now, then in zip(_counts(engine), before, strict=True))
                values = {"tokens_per_second": rate}
                if mode == "off":
                    best[rows] = rate
                elif rows in best:
                    values["times_faster"] = rate / best[rows]
                if drafted:
                    values["accepted"] = accepted / drafted
                context.row(f"{mode} x {rows}", **values)


def _complete(
    engine: EngineCore, tasks: Sequence[tuple[list[int], LoRARequest | None]], params: SamplingParams, concurrency: int
) -> Round:
    requests = [load.make_requests([prompt], params, [lora])[0] for prompt, lora in tasks]
    return Run(engine, "speculation").complete(requests, concurrency)


def _counts(engine: EngineCore) -> tuple[int, int]:
    """(verified drafts, accepted drafts) so far."""
    counts = [entry.counts for entry in engine.stats().speculation]
    return sum(c.num_draft_tokens for c in counts), sum(c.num_accepted_tokens for c in counts)
