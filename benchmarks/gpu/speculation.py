"""Speculation on the demo model, grown to a large one that writes equal text: real acceptance at a real size."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from outrider import LoRARequest
from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.models.demo import demo_adapters, demo_draft_path, demo_eagle3_path, demo_model_path
from outrider.platform.cli.bench.prompts import DEMO_PROMPTS

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


def demo_folder(context: Context, root: Path) -> dict[str, Path]:
    """Folders of the target and its drafters; for a quick run the demo's own."""
    if context.quick:
        return {"base": demo_model_path(), "draft_model": demo_draft_path(), "eagle3": demo_eagle3_path()}
    folder = grow(root)
    return {"base": folder / "base", "draft_model": folder / "draft", "eagle3": folder / "eagle3"}


def measure_speculation(context: Context, root: Path) -> None:
    """Measure output tokens a second and the acceptance of every drafter at 1 and 8 requests."""
    folders = demo_folder(context, root)
    tokenizer = load_tokenizer(demo_model_path())
    prompts = [tokenizer.encode(text) for text in DEMO_PROMPTS["base"]]
    loras = [LoRARequest(name, path=str(path)) for name, path in demo_adapters().items()] if context.quick else []
    tokens = 8 if context.quick else 128
    best: dict[int, float] = {}
    for mode, config in MODES.items():
        if not context.has_time(mode, 8):
            continue
        speculative = None
        if config is not None:
            speculative = config | ({"model": str(folders[mode])} if mode in folders else {})
            if mode == "adaptive":
                speculative["model"] = str(folders["eagle3"])
        options = {"load_format": "auto", "max_model_len": 512, "max_num_seqs": 8, "speculative_config": speculative}
        options |= {"enable_lora": bool(loras), "max_lora_rank": 64}
        with running(str(folders["base"]), context.device, **options) as engine:
            for rows in (1, 2) if context.quick else (1, 8):
                batch = [prompts[index % len(prompts)] for index in range(rows)]
                load.generate(engine, batch, load.greedy(tokens), loras[:rows])
                before = _counts(engine)
                started = time.perf_counter()
                load.generate(engine, batch, load.greedy(tokens), loras[:rows])
                rate = rows * tokens / (time.perf_counter() - started)
                drafted, accepted = (now - then for now, then in zip(_counts(engine), before, strict=True))
                values = {"tokens_per_second": rate}
                if mode == "off":
                    best[rows] = rate
                elif rows in best:
                    values["times_faster"] = rate / best[rows]
                if drafted:
                    values["accepted"] = accepted / drafted
                context.row(f"{mode} x {rows}", **values)


def _counts(engine: Any) -> tuple[int, int]:
    """(verified drafts, accepted drafts) so far."""
    counts = [entry.counts for entry in engine.stats().speculation]
    return sum(c.num_draft_tokens for c in counts), sum(c.num_accepted_tokens for c in counts)
