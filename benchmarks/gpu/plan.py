"""The sections of a run, the most wanted first, and their time boxes. Imports nothing heavy."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from .report import Context

SECONDS = 520.0
"""Seconds of a run, start and table included. Machines with a GPU end a command after 600."""

GRACE = 10.0
"""Seconds from a section's end until its process is killed."""


class Entry(NamedTuple):
    """One section."""

    name: str
    seconds: float
    """Time box. A section may also use the time that earlier ones have left."""
    function: str
    """Name "module.function" in this folder, with the arguments (context[, folder for models[, shape]])."""
    shape: str = ""
    """Name of a shape in `models`, for functions that take one."""
    is_optional: bool = False
    """True when the section runs only if --sections names it."""

    def work(self, root: Path, shapes: dict[str, str]) -> Callable[[Context], None]:
        """The function with its arguments; `shapes` replaces shapes by name."""
        module, _, name = self.function.rpartition(".")
        function = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        arguments: list[Any] = [root]
        if self.shape:
            models = importlib.import_module(f"{__package__}.models")
            arguments.append(getattr(models, shapes.get(self.shape, self.shape)))
        arguments = arguments[: len(inspect.signature(function).parameters) - 1]
        return lambda context: function(context, *arguments)


def describe() -> dict[str, Any]:
    """Description of the machine for the head of the results."""
    return importlib.import_module("outrider.platform.cli.bench.machine").describe_machine()


QUICK_SHAPES = {"LLAMA_8B": "TINY", "QWEN_06B": "TINY_QWEN", "SMALL": "TINY", "MEDIUM": "TINY_QWEN"}
SECTIONS = (
    Entry("tests", 120, "checks.run_tests"),
    Entry("ceilings", 15, "timing.measure_ceilings"),
    Entry("parity", 30, "checks.check_parity"),
    Entry("kernels", 60, "kernels.measure_kernels"),
    Entry("quantized", 30, "kernels.measure_quantized"),
    Entry("8b", 60, "end_to_end.measure_model", "LLAMA_8B"),
    Entry("8b-lora", 45, "end_to_end.measure_adapters", "LLAMA_8B"),
    Entry("0.6b", 30, "end_to_end.measure_model", "QWEN_06B"),
    Entry("0.6b-lora", 30, "end_to_end.measure_adapters", "QWEN_06B"),
    Entry("graphs", 25, "end_to_end.measure_graphs", "QWEN_06B"),
    Entry("ranks", 10, "ranks.check_ranks", "QWEN_06B"),
    Entry("speculate", 40, "speculation.measure_speculation"),
    Entry("demo", 25, "checks.check_demo"),
    Entry("invariant", 200, "speculation.count_differing", is_optional=True),
    Entry("spec-large", 240, "speculation.measure_large", is_optional=True),
    Entry("http", 200, "serving.measure_serving", "LLAMA_8B", is_optional=True),
    Entry("cpu-27m", 200, "processor.measure_processor", "SMALL", is_optional=True),
    Entry("cpu-494m", 310, "processor.measure_processor", "MEDIUM", is_optional=True),
    Entry("tune", 480, "tuning.measure_tuning", "LLAMA_8B", is_optional=True),
)
