"""Builds the proposer under the controller."""

from __future__ import annotations

import time

from ..platform.core.speculative_config import MODEL_METHODS, SpeculativeConfig
from .adaptive import AdaptiveProposer
from .controller import DrafterTraits
from .device_timer import CudaTimer
from .drafters.base import Drafter
from .drafters.ngram import NgramProposer

_LOOKUP_MIN = 2
"""Tokens that must repeat for the fallback to draft: after one alone it is hardly ever right where a network is not."""


def make_adaptive(
    proposer: Drafter,
    config: SpeculativeConfig,
    device: str = "cpu",
    *,
    asynchronous: bool = False,
    kind: type[AdaptiveProposer] | None = None,
) -> AdaptiveProposer:
    """`proposer` under the controller, with prompt lookup to fall back on where `proposer` is neural.

    `asynchronous`: another thread than the one that drafts computes the target's steps. `kind`: None is
    AdaptiveProposer.
    """
    drafters: list[tuple[DrafterTraits, Drafter]] = [
        (DrafterTraits(config.method, has_passes=config.method in MODEL_METHODS), proposer)
    ]
    if drafters[0][0].has_passes:
        lookup = NgramProposer(
            max(config.prompt_lookup_min, min(_LOOKUP_MIN, config.prompt_lookup_max)), config.prompt_lookup_max
        )
        drafters.append((DrafterTraits("ngram", has_passes=False), lookup))
    cpu_clock = time.thread_time if device == "cpu" and not asynchronous else None
    timer = CudaTimer if device == "cuda" else None
    made = kind or AdaptiveProposer
    return made(drafters, config.num_speculative_tokens, cpu_clock=cpu_clock, timer=timer)
