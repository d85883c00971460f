"""The stages: tokenizer, base, draft, adapters, eagle3 and card. Each reads what the earlier ones wrote below the output."""

import json
import logging
import shutil
from collections.abc import Callable
from functools import partial

from .. import DEMO_MODEL_NAME
from .adapters import AdapterJob
from .card import model_card
from .config import (
    ADAPTER_PLANS,
    BASE_SCHEDULE,
    BASE_SHAPE,
    DRAFT_SCHEDULE,
    DRAFT_SHAPE,
    SEED,
)
from .evaluation import evaluate
from .heads import train_draft_adapters, train_head
from .mixture import base_document
from .tokenizer import train_tokenizer
from .training import Trainer, distillation_loss, export_model, new_model, step_batch, token_loss
from .workshop import Workshop, load_model

log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def tokenizer_stage(shop: Workshop) -> None:
    """Train the tokenizer into the base and the draft folder."""
    shop.base.mkdir(parents=True, exist_ok=True)
    shop.draft.mkdir(parents=True, exist_ok=True)
    train_tokenizer(shop.base)
    for name in TOKENIZER_FILES:
        shutil.copyfile(shop.base / name, shop.draft / name)


def base_stage(shop: Workshop) -> None:
    """Train the base model on the base mixture."""
    model = new_model(BASE_SHAPE, SEED)
    encode = shop.encoder()
    Trainer(model, BASE_SCHEDULE, shop.work / "base").run(
        lambda step: step_batch(base_document, encode, BASE_SCHEDULE, SEED, step),
        partial(token_loss, model),
        lambda: export_model(model, shop.base),
    )


def draft_stage(shop: Workshop) -> None:
    """Train the draft model to guess what the base model says."""
    teacher = load_model(shop.base)
    model = new_model(DRAFT_SHAPE, SEED)
    encode = shop.encoder()
    Trainer(model, DRAFT_SCHEDULE, shop.work / "draft").run(
        lambda step: step_batch(base_document, encode, DRAFT_SCHEDULE, SEED + 2, step),
        partial(distillation_loss, model, teacher),
        lambda: export_model(model, shop.draft),
    )


def adapters_stage(shop: Workshop) -> None:
    """Train every adapter, and the adapter of the draft model that goes with it."""
    encode = shop.encoder(prompt_weight=0.0)
    for name, plan in ADAPTER_PLANS.items():
        job = AdapterJob(name, plan, DEMO_MODEL_NAME, shop.work / name, shop.adapter(name))
        job.train(load_model(shop.base), encode)
        log.info("adapter %s is trained", name)
    train_draft_adapters(shop, "draft_model")


def eagle3_stage(shop: Workshop) -> None:
    """Train the EAGLE-3 head, and for each adapter the draft weights of the head."""
    train_head(shop)
    train_draft_adapters(shop, "eagle3")


def card_stage(shop: Workshop) -> None:
    """Measure everything that is shipped and write the model card."""
    results = evaluate(shop)
    (shop.work / "evaluation.json").write_text(json.dumps(results, indent=1, ensure_ascii=False))
    (shop.output / "MODEL_CARD.md").write_text(model_card(shop, results))


STAGES: dict[str, Callable[[Workshop], None]] = {
    "tokenizer": tokenizer_stage,
    "base": base_stage,
    "draft": draft_stage,
    "adapters": adapters_stage,
    "eagle3": eagle3_stage,
    "card": card_stage,
}
