"""Wraps the parts of a built engine's step, so that a measurement can time them. What is not wrapped is as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from .setup import EngineParts

Wrap: TypeAlias = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""(name, function) to a function that does the same."""

_LORA = ("lora", "gains", "lookup_lora", "lookup_gains", "head_lora", "head_gains")
"""Where layers have their adapters."""


def trace(parts: EngineParts, wrap: Wrap) -> None:
    """Wrap the functions that make up a step: of the objects of this engine, so that others are not touched.

    Names: schedule, wait, prepare, forward, attention, LoRA, logits, sample, draft, commit. They nest: attention and
    LoRA lie inside forward, and forward inside prepare, whose own time is what it takes to build the batch.
    """

    def around(name: str, owner: Any, function: str) -> None:
        setattr(owner, function, wrap(name, getattr(owner, function)))

    runner, model = parts.runner, parts.runner._model
    around("schedule", parts.scheduler, "schedule")
    around("commit", parts.scheduler, "commit")
    around("wait", parts.adapters, "wait")
    around("prepare", runner, "_forward")
    around("prepare", runner, "_prepare_head")
    around("sample", runner, "_sample")
    around("draft", runner._proposer, "propose")
    around("forward", model, "forward")
    if runner._passes is not None:
        around("forward", runner._passes, "run")  # captured passes call nothing of the model
    around("logits", model, "compute_logits")
    around("attention", model.attention, "forward_qkv")
    for layer in (*model.linears(), model.embedding):
        for place in _LORA:
            site = getattr(layer, place, None)
            for function in ("add", "scale"):
                if hasattr(site, function):
                    around("LoRA", site, function)
