"""The EAGLE-3 head and the adapters' draft weights, made with `outrider train-draft` in a process of its own."""

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from ...models.demo import DEMO_MODEL_NAME
from .config import DRAFT_LORA_PLANS, HEAD_PLAN, HEAD_PROMPT_SEED, HeadPlan
from .documents import Document
from .evaluation import DRAFT_LENGTH, HELD_OUT_SEED, PROMPTS
from .folders import DemoFolders
from .mixture import adapter_document, base_document, drafting_document

log = logging.getLogger(__name__)

HEAD_FILES = ("config.json", "model.safetensors")
LORA_FILES = ("adapter_config.json", "adapter_model.safetensors")
LOG_FILE = "training_log.jsonl"


def write_prompts(path: Path, draw: Callable[[Random], Document], count: int, seed: int) -> None:
    """Draw `count` chats and write them as JSONL; the target will write their last answers."""
    rng = Random(seed)
    lines: list[str] = []
    while len(lines) < count:
        document = draw(rng)
        if document.messages:
            messages = [{"role": role, "content": content} for role, content in document.messages]
            lines.append(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


class Requests(NamedTuple):
    """Generators of the chats for training and for measurements."""

    learned: Callable[[Random], Document]
    measured: Callable[[Random], Document]


def _train(folders: DemoFolders, name: str, plan: HeadPlan, requests: Requests, more: Iterable[str]) -> Path:
    """Run the command with prompts of its own, or continue an earlier run. Returns its folder."""
    work, held_out = folders.work / name, 2 * PROMPTS if name == "eagle3" else PROMPTS
    data, measured_on = folders.work / "prompts" / f"{name}.jsonl", folders.work / "prompts" / f"{name}-held-out.jsonl"
    write_prompts(data, requests.learned, plan.prompts, HEAD_PROMPT_SEED)
    write_prompts(measured_on, requests.measured, held_out, HELD_OUT_SEED)
    options = {
        "model": folders.base,
        "data": data,
        "eval-data": measured_on,
        "output": work,
        "k": DRAFT_LENGTH,
        "steps": plan.steps,
        "warmup": plan.warmup,
        "batch-tokens": plan.batch_tokens,
        "lr": plan.rate,
        "optimizer": plan.optimizer,
        "seed": plan.seed,
        "eval-every": plan.eval_every,
        "save-every": plan.eval_every,
    }
    command = [sys.executable, "-I", "-m", "outrider.platform.cli.main", "train-draft", "--generate"]
    command += [part for option, value in options.items() for part in (f"--{option}", str(value))]
    if (work / "run.json").exists():
        command.append("--resume")
    subprocess.run([*command, *more], check=True)
    return work


def _ship(work: Path, output: Path, files: Iterable[str]) -> None:
    output.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(work / file, output / file)


def train_head(folders: DemoFolders) -> None:
    """Train the EAGLE-3 head on answers of the base model."""
    size = ["--intermediate-size", str(HEAD_PLAN.intermediate)]
    requests = Requests(base_document, base_document)
    work = _train(folders, "eagle3", HEAD_PLAN, requests, ["--method", "eagle3", *size])
    _ship(work, folders.eagle3, HEAD_FILES)


def train_draft_adapters(folders: DemoFolders, method: str) -> None:
    """Train, for each adapter, a LoRA of the drafter of `method` on answers of the adapted base model."""
    drafter, base_name = {
        "draft_model": (folders.draft, f"{DEMO_MODEL_NAME}-draft"),
        "eagle3": (folders.eagle3, f"{DEMO_MODEL_NAME}-eagle3"),
    }[method]
    for name, plan in DRAFT_LORA_PLANS.items():
        more = ["--method", "draft-lora", "--adapter", str(folders.adapter(name)), "--draft", str(drafter)]
        more += ["--rank", str(plan.rank), "--base-name", base_name]
        requests = Requests(partial(drafting_document, name=name), partial(adapter_document, name=name))
        work = _train(folders, f"{name}-{method}", plan, requests, more)
        _ship(work, folders.draft_adapter(name, method), LORA_FILES)
        log.info("draft adapter %s of %s is trained", name, method)


def head_measurements(folders: DemoFolders, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """First and last measurement in the log of the training: before it began, and of the shipped weights."""
    folder = folders.work / ("eagle3" if name == "base" else f"{name}-eagle3")
    lines = [json.loads(line) for line in (folder / LOG_FILE).read_text().splitlines()]
    return lines[0], lines[-1]
