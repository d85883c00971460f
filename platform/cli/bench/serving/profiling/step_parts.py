"""The parts of an engine's step, wrapped so that `--profile` can time them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from ......models.pass_graphs import GraphedPass
from .....engine.engine_core import EngineCore
from .....engine.runner.model_runner import ModelRunner
from .....engine.sampling.sampler import Sampler

Wrap: TypeAlias = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""(name, function) to a function that does the same and is timed under the name."""
_ADAPTER_SITES = ("lora", "gains", "lookup_lora", "lookup_gains", "head_lora", "head_gains")
"""Attributes of layers that hold the weights of adapters."""


def wrap_parts(core: EngineCore, wrap: Wrap) -> None:
    """Wrap the functions of a step: of this engine's objects, and of the classes that only an engine uses. The process
    is made for one profile.

    Names: schedule, prepare, forward, replay, attention, LoRA, logits, sample, collect, commit, draft. They nest:
    attention and LoRA lie inside forward, and forward inside prepare, whose own time is that of building the batch.
    `replay` is a captured pass of the target or the drafter; `collect` waits for the outcome.
    """

    def around(name: str, owner: Any, function: str) -> None:
        setattr(owner, function, wrap(name, getattr(owner, function)))

    model = core.model
    around("schedule", core.scheduler, "schedule")
    around("commit", core.scheduler, "commit")
    around("prepare", ModelRunner, "launch")
    around("collect", ModelRunner, "collect")
    around("draft", ModelRunner, "draft")
    around("sample", Sampler, "begin")
    around("replay", GraphedPass, "run")
    around("forward", model, "forward")
    around("logits", model, "compute_logits")
    around("attention", model.attention, "forward_qkv")
    for layer in (*model.linears(), model.embedding):
        for site in filter(None, (getattr(layer, place, None) for place in _ADAPTER_SITES)):
            for function in ("add", "scale"):
                if hasattr(site, function):
                    around("LoRA", site, function)
