"""Graphs of an engine: the passes that are captured, and their capture before the first request."""

from __future__ import annotations

import math

import torch

from ....kernels.graphs import CudaGraphs, GraphBackend
from ....models.pass_graphs import PassGraphs
from ....models.pass_grid import PassLimits
from ...core.config import EngineConfig
from ...core.speculative_config import BLOCK_METHODS, MODEL_METHODS
from ..executor.base import Executor

SECONDS = 10.0
"""Longest time in which graphs are captured at the start. An 8B model takes about 0.1 s for each of at most 60."""


def graph_backend(config: EngineConfig) -> GraphBackend | None:
    """Backend that captures this engine's passes; None: none is captured. On a CPU a launch costs next to nothing."""
    if config.device != "cuda" or config.enforce_eager:
        return None
    return CudaGraphs(torch.device(config.device))


def make_graphs(config: EngineConfig) -> PassGraphs | None:
    """Graphs in which the engine's passes are captured; None: none are."""
    backend = graph_backend(config)
    return None if backend is None else PassGraphs(backend, pass_limits(config))


def pass_limits(config: EngineConfig) -> PassLimits:
    """Limits of the captured passes. Without drafts a row has one token: forced tokens of a grammar take a shape of
    prompts."""
    speculative, graphs_per_shape, has_loops = config.speculative, 1 if config.lora is None else 2, False
    if speculative is not None and speculative.method in MODEL_METHODS and config.num_ranks == 1:
        # With several ranks the drafter's passes are not captured. Medusa's have two graphs.
        has_loops = speculative.method not in ("medusa", *BLOCK_METHODS)
        graphs_per_shape += 2 if speculative.method == "medusa" else 1
    return PassLimits(
        config.scheduler.max_num_seqs,
        config.scheduler.max_model_len,
        max_drafts=0 if speculative is None else speculative.num_speculative_tokens,
        graphs_per_shape=graphs_per_shape,
        has_loops=has_loops,
    )


def capture_ahead(graphs: PassGraphs, executor: Executor, *, has_ranks: bool) -> None:
    """Capture all passes, so that no request waits for it. Ranks, whose clocks differ, capture all without a bound."""
    executor.announce_captures()
    graphs.capture_ahead(math.inf if has_ranks else SECONDS)
