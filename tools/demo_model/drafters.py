"""The EAGLE-3 head and the adapters' draft weights, made with `outrider train-draft`."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

from ...models.demo import DEMO_MODEL_NAME
from ...platform.cli.main import main as outrider
from .config import DRAFT_LORA_RANK, RANKS, SEED, WINDOW, Demo
from .evaluation import DRAFT_LENGTH, HELD_OUT, HELD_OUT_SEED
from .mixture import adapter_document, base_document, drafting_document
from .templates import Document

Draw = Callable[[Random], Document]
PROMPT_SEED = SEED * 1_000_003 + 77  # none of a training step's, and none of the held-out prompts'


def write_prompts(path: Path, draw: Draw, count: int, seed: int) -> str:
    """Draw chats and write them as JSONL; the target will write their last answers."""
    rng = Random(seed)
    chats = (document.messages for document in iter(lambda: draw(rng), None) if document.messages)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for _, messages in zip(range(count), chats, strict=False):
            turns = [{"role": role, "content": content} for role, content in messages]
            file.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")
    return str(path)


def _train_draft(demo: Demo, name: str, learned: Draw, measured: Draw, options: dict[str, object]) -> Path:
    """Run the command, or continue an earlier run. Returns its folder."""
    work, prompts = demo.work / name, demo.work / "prompts"
    options |= {
        "model": demo.base,
        "data": write_prompts(prompts / f"{name}.jsonl", learned, demo.scaled(8000, least=8), PROMPT_SEED),
        "eval-data": write_prompts(
            prompts / f"{name}-held-out.jsonl", measured, demo.scaled(HELD_OUT, least=8), HELD_OUT_SEED
        ),
        "output": work,
        "k": DRAFT_LENGTH,
        "max-tokens": demo.scaled(256, least=16),
        "batch-tokens": 1536,
        "lr": 4e-3,
        "seed": SEED,
    }
    command = [
        "train-draft",
        "--generate",
        *(part for key, value in options.items() for part in (f"--{key}", str(value))),
    ]
    if outrider([*command, *(["--resume"] if (work / "run.json").exists() else [])]):
        raise RuntimeError(f"train-draft of {name} failed")
    return work


def _ship(work: Path, output: Path, *files: str) -> None:
    output.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(work / file, output / file)


def train_head(demo: Demo) -> None:
    """Train the EAGLE-3 head on answers of the base model."""
    options = {"method": "eagle3", "steps": demo.scaled(1000), "optimizer": "muon", "intermediate-size": 384}
    work = _train_draft(demo, "eagle3", base_document, base_document, options)
    _ship(work, demo.drafters["eagle3"], "config.json", "model.safetensors")
    file = demo.drafters["eagle3"] / "config.json"  # the head looks back as far as the base model
    config = json.loads(file.read_text()) | {
        "sliding_window": WINDOW,
        "use_sliding_window": True,
        "max_window_layers": 0,
    }
    file.write_text(json.dumps(config, indent=2) + "\n")


def train_draft_weights(demo: Demo) -> None:
    """Train for each adapter and each drafter a LoRA of the drafter on answers of the adapted base model."""
    for method, drafter in demo.drafters.items():
        for name in RANKS:
            options = {
                "method": "draft-lora",
                "adapter": demo.adapter(name),
                "draft": drafter,
                "rank": DRAFT_LORA_RANK,
                "base-name": f"{DEMO_MODEL_NAME}-{drafter.name}",
                "steps": demo.scaled(1500),
                "warmup": 20,
            }
            learned, measured = (partial(draw, name=name) for draw in (drafting_document, adapter_document))
            work = _train_draft(demo, f"{name}-{method}", learned, measured, options)
            _ship(work, demo.adapter(name) / "draft" / method, "adapter_config.json", "adapter_model.safetensors")
