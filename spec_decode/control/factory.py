"""Builds drafters, and the policy that chooses among them, from a speculative configuration."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...platform.core.speculative_config import MODEL_METHODS, SpeculativeConfig
from ..drafters.answers import make_groups
from ..drafters.base import Drafter
from ..drafters.corpus import load_corpora
from ..drafters.factory import DrafterContext, make_drafter
from ..drafters.ngram import NgramDrafter
from .adapters import DrafterTraits
from .costs import Padded
from .drafter_group import DrafterGroup
from .policy import SpeculationPolicy

_LOOKUP_MIN = 2
"""Tokens that must repeat for the fallback to draft: a match of one token is rarely right if the network is wrong."""
_NEURAL_RATE, _LOOKUP_RATE = 0.7, 0.5
"""Expected acceptance before any draft was verified: high enough that each drafter is tried at once."""


class Speculation(NamedTuple):
    """Parts of speculation that the engine runs."""

    drafter: Drafter
    policy: SpeculationPolicy | None
    """None: as many drafts as may be, in every step."""


def make_speculation(
    config: SpeculativeConfig | None, context: DrafterContext, padded: Padded | None = None
) -> Speculation:
    """The drafter of `config`; if adaptive, with the policy, and with prompt lookup as fallback of a neural drafter.
    `padded`: see `StepCosts`.

    Raises:
        InvalidRequestError, UnsupportedModelError, NotFoundError: see `make_drafter`.
    """
    drafter = make_drafter(config, context)
    if config is None or not config.adaptive:
        return Speculation(drafter, None)
    most = config.num_speculative_tokens
    is_neural = config.method in MODEL_METHODS
    first_rate = _NEURAL_RATE if is_neural else _LOOKUP_RATE
    traits = [DrafterTraits(config.method, min(most, drafter.needs.max_drafts), first_rate)]
    if not is_neural:
        is_free = type(drafter) is NgramDrafter and torch.device(context.device).type == "cpu"
        return Speculation(drafter, SpeculationPolicy([traits[0]._replace(is_free=is_free)], padded=padded))
    least = max(config.prompt_lookup_min, min(_LOOKUP_MIN, config.prompt_lookup_max))
    corpora = load_corpora(config, context)
    groups = make_groups(config)
    fallback = NgramDrafter(least, config.prompt_lookup_max, by_match=True, corpora=corpora, groups=groups)
    traits.append(DrafterTraits("ngram", most, _LOOKUP_RATE))
    policy = SpeculationPolicy(traits, padded=padded)
    return Speculation(DrafterGroup([drafter, fallback], policy.prefers_match, policy.looks_up), policy)
