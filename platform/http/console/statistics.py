"""The numbers on the console: one snapshot of the engine a second, however many consoles look at it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Counts
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from .... import __version__
from ...core.adapter_names import label_text
from ...core.messages import AdapterInfo, EngineStats, SpeculationCounts
from ..observe.recent_rates import LATENCY_SECONDS
from ..observe.recent_rates import Point as RecentPoint
from ..serving_state import Serving
from .acceptance_split import AcceptanceTotals, Split
from .stats_schema import (
    Acceptance,
    AdapterFacts,
    CacheFacts,
    LoraFacts,
    Point,
    QueueFacts,
    ServerFacts,
    Stats,
    TenantFacts,
)

MIN_INTERVAL = 0.8
"""Seconds that a snapshot is good for: less than one, so that polls each second always get a new one."""
MAX_HISTORY = 300
"""Longest history in seconds."""
MAX_ADAPTERS = 200
"""Adapters with numbers of their own: there may be thousands."""


_OF_ENGINE = (
    *("architecture", "dtype", "device", "num_parameters", "max_model_len", "speculation"),
    *("num_kv_blocks", "block_size"),
)
"""Fields of `ServerFacts` that `EngineInfo` has under the same names."""
_NO_ADAPTER = AdapterInfo("", "", "", 0, 0, "")
"""Facts about the base model, and about an adapter that the engine does not have any more."""


class Gauges(NamedTuple):
    """Gauges of the engine, as of one snapshot."""

    running: int
    waiting: int
    kv_cache_usage: float
    lora_rows_used: int
    speculation: SpeculationCounts
    """Counts of all requests, cumulative."""


class Statistics:
    """One a server; lives as long as the app. All calls belong to its event loop."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._acceptance = AcceptanceTotals()
        self._gauges: dict[int, Gauges] = {}  # by second of the monotonic clock
        self._snapshot_at: float | None = None
        self._making: asyncio.Task[bytes] | None = None
        self._made_at = -MIN_INTERVAL
        self._json = b""

    async def json(self) -> bytes:
        """`Stats` without history; the same bytes for all who ask within `MIN_INTERVAL`."""
        if self._making is None and time.monotonic() - self._made_at < MIN_INTERVAL:
            return self._json
        if self._making is None:
            self._making = asyncio.create_task(self._make())
        # Callers meanwhile wait for the same snapshot; one that leaves does not cancel it.
        return await asyncio.shield(self._making)

    async def json_with_history(self, seconds: int) -> bytes:
        """`Stats` with the points of the last `seconds`, at most `MAX_HISTORY`."""
        await self.json()
        # Tens of milliseconds on a busy server, so outside the event loop.
        points = await asyncio.to_thread(self._serving.metrics.recent.points, min(seconds, MAX_HISTORY))
        return self._stats(points, with_history=True).model_dump_json().encode()

    async def _make(self) -> bytes:
        try:
            await self._look()
            self._json = self._stats(self._serving.metrics.recent.points()).model_dump_json().encode()
            self._made_at = time.monotonic()
            return self._json
        finally:
            self._making = None

    async def _look(self) -> None:
        """Take a snapshot of the engine; without an answer the last one stays."""
        if self._serving.llm.state not in ("ready", "paused", "draining"):
            return
        stats = await self._serving.update_metrics()
        if stats is None:
            return
        self._acceptance.update(stats)
        self._snapshot_at = now = time.monotonic()
        self._gauges[int(now)] = Gauges(
            stats.num_running, stats.num_waiting, stats.kv_cache_usage, stats.lora_rows_used, self._acceptance.total()
        )
        for second in [s for s in self._gauges if s < now - MAX_HISTORY - LATENCY_SECONDS]:
            del self._gauges[second]

    # --- from counts to what is shown ---

    def _stats(self, recent: Sequence[RecentPoint], *, with_history: bool = False) -> Stats:
        metrics = self._serving.metrics
        stats, counters = metrics.stats, metrics.counters
        rates = metrics.recent.rates()
        offset = time.time() - time.monotonic()  # between the clocks
        points = [self._point(point, offset) for point in recent]
        tenants, by_adapter = defaultdict[str, float](float), defaultdict[str, float](float)
        for (adapter, tenant), rate in rates.items():
            tenants[tenant] += rate
            by_adapter[label_text(adapter)] += rate
        adapters, total = self._adapters(stats, by_adapter), self._acceptance.total()
        levels = Counts(info.level for info in stats.adapters)
        return Stats(
            time=time.time(),
            server=self._server(),
            live=points[-1],
            queue=QueueFacts(
                running=stats.num_running,
                waiting=stats.num_waiting,
                waiting_by_reason=stats.num_waiting_by_reason,
                preemptions=counters.num_preemptions,
            ),
            kv_cache=CacheFacts(
                usage=stats.kv_cache_usage,
                prefix_queries=counters.prefix_cache_queries,
                prefix_hits=counters.prefix_cache_hits,
            ),
            lora=LoraFacts(
                rows=stats.lora_rows,
                rows_used=stats.lora_rows_used,
                host_bytes=stats.lora_host_bytes,
                registered=stats.num_adapters,
                on_device=levels["device"],
                in_host_memory=levels["host"],
                load_failures=counters.lora_load_failures,
            ),
            speculation=_acceptance(total),
            tokens_by_drafter={name: tokens for name, (_, tokens) in total.by_drafter(stats.drafters).items()},
            adapters=adapters[:MAX_ADAPTERS],
            adapters_left_out=max(0, len(adapters) - MAX_ADAPTERS),
            tenants=[TenantFacts(tenant=t, output_tokens_per_second=rate) for t, rate in sorted(tenants.items())],
            history=points if with_history else None,
        )

    def _server(self) -> ServerFacts:
        llm, now = self._serving.llm, time.monotonic()
        info = llm.info
        return ServerFacts(
            state=self._serving.state,
            version=__version__,
            uptime=now - self._serving.started,
            engine_restarts=llm.num_restarts,
            snapshot_age=None if self._snapshot_at is None else now - self._snapshot_at,
            model=self._serving.models.base_name,
            has_tenants=self._serving.tenancy is not None,
            **{name: getattr(info, name) for name in _OF_ENGINE},
        )

    def _point(self, point: RecentPoint, offset: float) -> Point:
        first, inter = point.first_token, point.inter_token
        # The one before, too: those who ask once a second may miss one.
        gauges = self._gauges.get(point.second, self._gauges.get(point.second - 1))
        speculation = None if gauges is None else self._recent_acceptance(point.second, gauges)
        return Point(
            time=round(point.second + offset),
            output_tokens_per_second=point.output_tokens_per_second,
            prompt_tokens_per_second=point.prompt_tokens_per_second,
            requests_per_second=point.requests_per_second,
            ttft_count=first.samples, ttft_p50=first.p50, ttft_p90=first.p90, ttft_p99=first.p99,
            itl_count=inter.samples, itl_p50=inter.p50, itl_p90=inter.p90, itl_p99=inter.p99,
            running=gauges and gauges.running,
            waiting=gauges and gauges.waiting,
            kv_cache_usage=gauges and gauges.kv_cache_usage,
            lora_rows_used=gauges and gauges.lora_rows_used,
            acceptance_rate=None if speculation is None else speculation.rate,
            acceptance_length=None if speculation is None else speculation.length,
        )  # fmt: skip

    def _recent_acceptance(self, second: int, gauges: Gauges) -> Acceptance | None:
        """Acceptance since the oldest snapshot of the last `LATENCY_SECONDS`."""
        before = [s for s in range(second - LATENCY_SECONDS, second) if s in self._gauges]
        return _acceptance(gauges.speculation.since(self._gauges[before[0]].speculation)) if before else None

    def _adapters(self, stats: EngineStats, rates: dict[str, float]) -> list[AdapterFacts]:
        """The base model, then the busiest first."""
        infos = {label_text(info.name): info for info in stats.adapters}
        names = infos.keys() | self._acceptance.by_adapter.keys() | rates.keys()
        facts = [self._adapter(name, infos.get(name), rates.get(name, 0.0)) for name in names | {""}]
        return sorted(
            facts, key=lambda f: (f.name != "", -(f.running + f.waiting), -f.output_tokens_per_second, f.name)
        )

    def _adapter(self, name: str, info: AdapterInfo | None, rate: float) -> AdapterFacts:
        split = self._acceptance.by_adapter.get(name) or Split(SpeculationCounts(), SpeculationCounts())
        info = info or _NO_ADAPTER
        return AdapterFacts(
            name=name,
            tier=info.level or None,
            rank=info.rank,
            rows=info.rows,
            bytes=info.num_bytes,
            pinned=info.pinned,
            draft=info.draft,
            running=info.num_running,
            waiting=info.num_waiting,
            output_tokens_per_second=rate,
            acceptance=_acceptance(split.total),
            with_draft_weights=_acceptance(split.with_draft_weights),
            without_draft_weights=_acceptance(split.without_draft_weights),
        )


def _acceptance(counts: SpeculationCounts) -> Acceptance | None:
    """None if nothing has been verified."""
    rate, length = counts.acceptance_rate, counts.acceptance_length
    if rate is None or length is None:
        return None
    return Acceptance(
        drafts=counts.num_verifications,
        draft_tokens=counts.num_draft_tokens,
        accepted_tokens=counts.num_accepted_tokens,
        rate=rate,
        length=length,
        per_position=counts.acceptance_per_position,
    )
