"""Options that are incompatible with each other or with the device: (condition, field to name, message)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .kv_events import parse_kv_events

if TYPE_CHECKING:
    from .config import EngineArgs, Hardware


def _divided(holds: Callable[[EngineArgs], bool]) -> Callable[[EngineArgs], bool]:
    """The condition `holds`, if several ranks compute the model."""
    return lambda args: args.tensor_parallel_size > 1 and holds(args)


def _learns(args: EngineArgs) -> bool:
    """True if drafts learn from tenants' traffic."""
    config = args.speculative_config
    return isinstance(config, Mapping) and config.get("learn") is not None


def _drafts_for_itself(args: EngineArgs) -> bool:
    """True if the target drafts for itself."""
    config = args.speculative_config
    return isinstance(config, Mapping) and config.get("method") == "uno"


OPTIONS: tuple[tuple[Callable[[EngineArgs], bool], str, str], ...] = (
    (
        lambda a: a.max_cpu_loras is not None and a.max_cpu_loras < a.max_loras,
        "max_cpu_loras",
        "max_cpu_loras must be at least max_loras: an adapter on the device is also kept in host memory",
    ),
    (
        _divided(lambda a: a.distributed_executor_backend == "uni"),
        "distributed_executor_backend",
        "distributed_executor_backend uni is one process; tensor_parallel_size above 1 needs mp or ray",
    ),
    (
        _divided(lambda a: a.model_impl == "transformers"),
        "model_impl",
        "model_impl transformers is not supported with tensor_parallel_size above 1: native families are divided",
    ),
    (
        _divided(lambda a: a.batch_invariant),
        "batch_invariant",
        "batch_invariant is not supported with tensor_parallel_size above 1: the order of a sum over ranks may depend "
        "on the batch",
    ),
    (
        lambda a: a.preemption_mode == "swap" and not a.swap_space,
        "preemption_mode",
        "preemption_mode swap needs swap_space: the host memory that blocks are kept in",
    ),
    (
        lambda a: not a.enable_prefix_caching and parse_kv_events(a.kv_events_config) is not None,
        "kv_events_config",
        "kv_events_config needs enable_prefix_caching: without it no later request finds the blocks",
    ),
    (
        _divided(lambda a: a.async_scheduling is True),
        "async_scheduling",
        "async_scheduling is not supported with tensor_parallel_size above 1 yet",
    ),
    (
        lambda a: _learns(a) and not a.enable_lora,
        "speculative_config",
        "speculative_config: learn needs enable_lora: learnt draft weights are rank rows",
    ),
    (
        _divided(_learns),
        "speculative_config",
        "speculative_config: learn is not supported with tensor_parallel_size above 1 yet",
    ),
    (
        _divided(_drafts_for_itself),
        "speculative_config",
        "speculative_config: uno is not supported with tensor_parallel_size above 1 yet: it computes in one process",
    ),
    (
        lambda a: _learns(a) and a.async_scheduling is True,
        "async_scheduling",
        "async_scheduling is not supported with learn in speculative_config yet: states are read when a request ends",
    ),
)
"""Checked in order; the first that holds is raised."""

WITH_DEVICE: tuple[tuple[Callable[[EngineArgs, Hardware], bool], str, str], ...] = (
    (
        lambda a, hardware: a.kv_cache_dtype != "auto" and not hardware.has_float8,
        "kv_cache_dtype",
        "kv_cache_dtype fp8 needs a GPU of compute capability 8.9 or more; this one has less",
    ),
    (
        lambda a, hardware: _learns(a) and hardware.device != "cpu",
        "speculative_config",
        "speculative_config: learn is for CPUs yet",
    ),
)
