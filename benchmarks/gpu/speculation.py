"""Speculation on the demo model, grown to a large one that writes equal text: real acceptance at a real size."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
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
"""Sizes of the grown model: four times the demo's hidden size, so that no weight is rounded; 0.5B parameters."""
LARGE_SIZES = ("--hidden-size", "4096", "--layers", "16", "--intermediate-size", "14336", "--dtype", "bfloat16")
LARGE_SIZES += ("--draft-hidden-size", "512", "--draft-layers", "2", "--draft-intermediate-size", "1024")
"""Sizes of the large model: layers of Llama-3-8B, half as many; 2.9B parameters, as no vocabulary is grown."""
MODES: dict[str, dict[str, Any] | None] = {
    "off": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 4},
    "adaptive": {"method": "eagle3"},
}
LARGE_MODES: dict[str, dict[str, Any]] = {
    "eagle3, adaptive": {"method": "eagle3"},
    "eagle3, k = 4": {"method": "eagle3", "num_speculative_tokens": 4},
    "prompt lookup, adaptive": {"method": "ngram"},
    "prompt lookup, k = 4": {"method": "ngram", "num_speculative_tokens": 4},
    "draft model, adaptive": {"method": "draft_model"},
    "draft model, k = 4": {"method": "draft_model", "num_speculative_tokens": 4},
}
"""Modes on the large model, the most wanted first."""
INVARIANT_MODES: dict[str, dict[str, Any] | None] = {
    "off": None,
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 4},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
}
"""Modes whose texts are compared with those of each request alone."""
TURNS = 2
"""Measured rounds of a mode, each after one without speculation on the same requests."""

Task = tuple[list[int], LoRARequest | None]
"""A prompt, and its adapter."""


def grow(root: Path, sizes: Sequence[str]) -> Path:
    """Grow the demo model, its drafters and adapters into a new folder."""
    folder = root / "inflated"
    adapters = [str(path) for path in demo_adapters().values()]
    script = Path(__file__).resolve().parent.parent / "inflate.py"
    heads = ["--draft", str(demo_draft_path()), "--eagle3", str(demo_eagle3_path())]
    command = [sys.executable, str(script), str(demo_model_path()), str(folder), *sizes, *heads]
    done = subprocess.run([*command, "--adapters", *adapters], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"inflate.py failed: {done.stdout}{done.stderr}")
    return folder


def demo_folders(context: Context, root: Path, sizes: Sequence[str] = SIZES) -> dict[str, Path]:
    """Folders of the grown target, its drafters and its adapters; for a quick run the demo's own."""
    if context.quick:
        found = {"base": demo_model_path(), "draft_model": demo_draft_path(), "eagle3": demo_eagle3_path()}
        return found | {f"adapters/{name}": path for name, path in demo_adapters().items()}
    folder = grow(root, sizes)
    found = {"base": folder / "base", "draft_model": folder / "draft", "eagle3": folder / "eagle3"}
    return found | {f"adapters/{name}": folder / "adapters" / name for name in demo_adapters()}


def _tasks(folders: dict[str, Path]) -> list[Task]:
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
        with _engine(context, folders, config, 8) as engine:
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


def measure_large(context: Context, root: Path) -> None:
    """Measure output tokens a second of each drafter over those without one, on a model of 2.9B parameters with 1, 8
    and 32 requests. Both engines are there at once, and their rounds alternate."""
    started = time.perf_counter()
    folders = demo_folders(context, root, LARGE_SIZES)
    context.row("grown", seconds=time.perf_counter() - started)
    sizes = (1, 2) if context.quick else (1, 8, 32)
    tasks = _tasks(folders)
    params = SamplingParams(temperature=0.0, max_tokens=8 if context.quick else 64)
    with _engine(context, folders, None, max(sizes)) as off:
        for mode, config in LARGE_MODES.items():
            if not context.has_time(mode, 0.0 if context.quick else 20.0):
                continue
            started = time.perf_counter()
            with _engine(context, folders, config, max(sizes)) as engine:
                context.row(f"{mode} ready", seconds=time.perf_counter() - started, captured=load.captured(engine))
                for rows in sizes:
                    if context.has_time(f"{mode} x {rows}", 4):
                        count = 4 if rows == 1 else 2 * rows
                        batch = list(itertools.islice(itertools.cycle(tasks), count))
                        _compare(context, f"{mode} x {rows}", off, engine, batch, params, rows)


def count_differing(context: Context, root: Path) -> None:
    """Count the texts in bfloat16 with `batch_invariant` that differ from those of each request alone without drafts:
    greedy and seeded, of the base model and the adapters, 1 and 32 requests at a time, with drafts and without. Then
    the same without `batch_invariant`, where some may differ."""
    folders = demo_folders(context, root)
    count, many = (8, 4) if context.quick else (200, 32)
    known = _tasks(folders)
    tasks = list(itertools.islice(itertools.cycle(known), count))
    length = {"max_tokens": 8 if context.quick else 64, "ignore_eos": True}
    params = [  # a prompt that comes again has a seed
        SamplingParams(
            **length, **({"temperature": 0.0} if index < len(known) else {"temperature": 0.8, "seed": index})
        )
        for index in range(count)
    ]
    for invariant, modes in ((True, INVARIANT_MODES), (False, {"off": None})):
        alone: list[list[int]] | None = None
        for mode, config in modes.items():
            with _engine(context, folders, config, many, batch_invariant=invariant) as engine:
                for rows in (1, many):
                    name = f"{'' if invariant else 'not '}invariant, {mode} x {rows}"
                    if not context.has_time(name, 0.0 if context.quick else 15.0):
                        continue
                    done = _complete(engine, tasks, params, rows)
                    texts = [record.token_ids for record in done.requests]
                    alone = texts if alone is None else alone
                    differ = sum(ours != theirs for ours, theirs in zip(texts, alone, strict=True))
                    context.row(
                        name,
                        texts=count,
                        differ=differ,
                        tokens_per_second=done.speed,
                        drafts=_counts(engine)[0],
                        **({"passed": differ == 0} if invariant else {}),
                    )


def _compare(
    context: Context,
    name: str,
    off: EngineCore,
    engine: EngineCore,
    tasks: Sequence[Task],
    params: SamplingParams,
    rows: int,
) -> None:
    """Measure a cell in turns with the engine without speculation."""
    for one in (off, engine):  # compiles, loads adapters
        _complete(one, tasks, params, rows)
    before, captured = _counts(engine), load.captured(engine)
    turns = [
        [_complete(one, tasks, params, rows) for one in (off, engine)] for _ in range(1 if context.quick else TURNS)
    ]
    base, ours = (Round.joined(rounds) for rounds in zip(*turns, strict=True))
    drafted, accepted = (now - then for now, then in zip(_counts(engine), before, strict=True))
    equal = [a.token_ids == b.token_ids for a, b in zip(base.requests, ours.requests, strict=True)]
    context.row(
        name,
        times_faster=ours.speed / base.speed,
        tokens_per_second=ours.speed,
        off_tokens_per_second=base.speed,
        accepted=accepted / drafted if drafted else float("nan"),
        drafts_per_token=drafted / ours.output_tokens,
        equal_texts=sum(equal) / len(equal),
        captured=load.captured(engine) - captured,
    )


def _engine(
    context: Context, folders: dict[str, Path], config: dict[str, Any] | None, rows: int, **more: Any
) -> AbstractContextManager[EngineCore]:
    """An engine with adapters and this drafter, for at most `rows` requests; `more` are other options."""
    options: dict[str, Any] = {"load_format": "auto", "max_model_len": 512, "max_num_seqs": rows}
    options |= {"enable_lora": True, "max_lora_rank": 64, "num_gpu_blocks_override": rows * 36}
    if config is not None:
        folder = folders.get(config["method"])
        options["speculative_config"] = config if folder is None else config | {"model": str(folder)}
    return running(str(folders["base"]), context.device, **(options | more))


def _complete(
    engine: EngineCore, tasks: Sequence[Task], params: SamplingParams | Sequence[SamplingParams], concurrency: int
) -> Round:
    """Run the tasks, with parameters for all or for each."""
    each = [params] * len(tasks) if isinstance(params, SamplingParams) else params
    requests = [
        load.make_requests([prompt], of_task, [lora])[0] for (prompt, lora), of_task in zip(tasks, each, strict=True)
    ]
    return Run(engine, "speculation").complete(requests, concurrency)


def _counts(engine: EngineCore) -> tuple[int, int]:
    """(verified drafts, accepted drafts) so far."""
    counts = [entry.counts for entry in engine.stats().speculation]
    return sum(c.num_draft_tokens for c in counts), sum(c.num_accepted_tokens for c in counts)
