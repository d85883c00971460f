"""The stages: tokenizer, base, draft, adapters, eagle3 and card. Each reads what the earlier ones wrote below the output."""

import json
import logging
import shutil
from collections.abc import Callable
from functools import partial

from ...models.demo import DEMO_MODEL_NAME
from .adapters import AdapterJob
from .card import model_card
from .config import ADAPTER_PLANS, BASE_SCHEDULE, BASE_SHAPE, DRAFT_SCHEDULE, DRAFT_SHAPE, SEED
from .evaluation import evaluate
from .folders import DemoFolders, load_model
from .heads import train_draft_adapters, train_head
from .mixture import base_document
from .tokenizer import train_tokenizer
from .training import Trainer, distillation_loss, export_model, new_model, step_batch, token_loss

log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def tokenizer_stage(folders: DemoFolders) -> None:
    """Train the tokenizer into the base and the draft folder."""
    folders.base.mkdir(parents=True, exist_ok=True)
    folders.draft.mkdir(parents=True, exist_ok=True)
    train_tokenizer(folders.base)
    for name in TOKENIZER_FILES:
        shutil.copyfile(folders.base / name, folders.draft / name)


def base_stage(folders: DemoFolders) -> None:
    """Train the base model on the base mixture."""
    model = new_model(BASE_SHAPE, SEED)
    encode = folders.encoder()
    Trainer(model, BASE_SCHEDULE, folders.work / "base").run(
        lambda step: step_batch(base_document, encode, BASE_SCHEDULE, SEED, step),
        partial(token_loss, model),
        lambda: export_model(model, folders.base),
    )


def draft_stage(folders: DemoFolders) -> None:
    """Train the draft model to guess the base model's answers."""
    teacher = load_model(folders.base)
    model = new_model(DRAFT_SHAPE, SEED)
    encode = folders.encoder()
    Trainer(model, DRAFT_SCHEDULE, folders.work / "draft").run(
        lambda step: step_batch(base_document, encode, DRAFT_SCHEDULE, SEED + 2, step),
        partial(distillation_loss, model, teacher),
        lambda: export_model(model, folders.draft),
    )


def adapters_stage(folders: DemoFolders) -> None:
    """Train every adapter, and the adapter of the draft model that goes with it."""
    encode = folders.encoder(prompt_weight=0.0)
    for name, plan in ADAPTER_PLANS.items():
        job = AdapterJob(name, plan, DEMO_MODEL_NAME, folders.work / name, folders.adapter(name))
        job.train(load_model(folders.base), encode)
        log.info("adapter %s is trained", name)
    train_draft_adapters(folders, "draft_model")


def eagle3_stage(folders: DemoFolders) -> None:
    """Train the EAGLE-3 head, and for each adapter the draft weights of the head."""
    train_head(folders)
    train_draft_adapters(folders, "eagle3")


def card_stage(folders: DemoFolders) -> None:
    """Measure all shipped models and write the model card."""
    results = evaluate(folders)
    (folders.work / "evaluation.json").write_text(json.dumps(results, indent=1, ensure_ascii=False))
    (folders.output / "MODEL_CARD.md").write_text(model_card(folders, results))


STAGES: dict[str, Callable[[DemoFolders], None]] = {
    "tokenizer": tokenizer_stage,
    "base": base_stage,
    "draft": draft_stage,
    "adapters": adapters_stage,
    "eagle3": eagle3_stage,
    "card": card_stage,
}
