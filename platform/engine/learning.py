"""Puts together the part of an engine that learns draft weights from tenants' traffic."""

from __future__ import annotations

from ...lora.manager import AdapterManager
from ...models.model import LanguageModel
from ...spec_decode.drafters.base import Drafter
from ...spec_decode.learning.learner import Learner
from ..core.config import EngineConfig
from .features import NoAdapters
from .load_memory import DRAFTER, memory_for


@memory_for(DRAFTER)
def make_learner(
    config: EngineConfig, model: LanguageModel, drafter: Drafter, adapters: AdapterManager | NoAdapters
) -> Learner | None:
    """Let the drafter learn, if a tenant opted in.

    Raises:
        InvalidRequestError: its head is of a variant that is not trained.
    """
    learn = None if config.speculative is None else config.speculative.learn
    if learn is None or config.speculative is None or not isinstance(adapters, AdapterManager):
        return None
    from ...spec_decode.learning.head_trainer import HeadTrainer  # only if it is used: it imports the training code

    trainer = HeadTrainer(config.speculative, model, learn.rank, learn.learning_rate)
    learner = Learner(learn, trainer, adapters.learnt, adapters.draft_weights)
    drafter.learn(learner)
    return learner
