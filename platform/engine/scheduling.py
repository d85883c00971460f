"""Scheduler of a configuration, with the memory that it hands out."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ...spec_decode.control.factory import Speculation
from ..core.config import EngineConfig
from ..core.state_size import ring_size
from .memory.block_pool import BlockPool
from .memory.host_store import HostStore
from .memory.host_tier import HostTier, SwapCost
from .memory.prefix_cache import PrefixCache
from .memory.state_slots import StateSlots
from .queue.gates import DraftLimits, Gate
from .queue.scheduler import Scheduler


def make_scheduler(
    config: EngineConfig,
    speculation: Speculation,
    gates: Sequence[Gate],
    host: HostStore | None,
) -> Scheduler:
    """Scheduler, with its KV blocks, the prefix cache over them, and slots of recurrent states.

    Args:
        gates: Resources of sequences; slots of states are added.
        host: Memory of `swap_space`, if there is any.
    """
    pool, options = BlockPool(config.cache.num_blocks), config.cache
    tier = None
    if host is not None:
        rate = None if options.always_swaps else host.bytes_per_second()
        tier = HostTier(options.num_host_blocks, SwapCost(host.block_bytes, options.block_size, rate))
    states = None if options.states is None else StateSlots(options.states, options.block_size)
    gates = gates if states is None else [*gates, states]
    cache = PrefixCache(pool, options.block_size, tier, states=states, keeps_finished=options.enable_prefix_caching)
    return Scheduler(config.scheduler, pool, cache, gates, _draft_limits(config, speculation), speculation.policy)


def _draft_limits(config: EngineConfig, speculation: Speculation) -> DraftLimits:
    options, needs = config.speculative, speculation.drafter.needs
    states = config.cache.states
    max_verified = sys.maxsize if states is None else states.ring_size - ring_size(0)
    if options is None:
        return DraftLimits(overlaps=config.async_scheduling, max_verified=max_verified)
    most = options.num_speculative_tokens
    if speculation.policy is None:
        most = min(most, needs.max_drafts)
    return DraftLimits(
        most,
        extra_slots=bool(needs.kv_layers or needs.target_draft),
        more_slots=needs.more_slots,
        # The host decides about synthetic acceptance.
        overlaps=config.async_scheduling and options.synthetic_acceptance_rates is None,
        max_positions=needs.max_positions,
        max_verified=max_verified,
        max_drafts_on_device=needs.max_drafts if needs.drafts_on_device else 0,
    )
