"""The JSON of `GET /admin/v1/stats`. Times are in seconds, shares go from 0 to 1, null is "nothing to say"."""

from __future__ import annotations

from pydantic import BaseModel


class ServerFacts(BaseModel):
    """Facts about the server, and its state."""

    state: str
    """"starting", "ready", "paused", "restarting", "sleeping", "draining" or "stopped"."""
    version: str
    uptime: float
    engine_restarts: int
    snapshot_age: float | None
    """Age of the engine's counts below, in seconds: it grows while the engine does not answer. Null before the
    first."""
    model: str
    architecture: str
    dtype: str
    device: str
    num_parameters: int
    max_model_len: int
    speculation: str
    num_kv_blocks: int
    block_size: int
    has_tenants: bool
    """True with a database: the rest of `/admin/v1` answers."""


class Point(BaseModel):
    """One second: rates over the 5 seconds before it, percentiles over the 30 seconds before it, and the engine's
    gauges. Gauges are null if no snapshot was taken in that second."""

    time: int
    """Since the epoch."""
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    requests_per_second: float
    """Prompts that were generated from to the end."""
    ttft_count: int
    ttft_p50: float | None
    ttft_p90: float | None
    ttft_p99: float | None
    itl_count: int
    itl_p50: float | None
    itl_p90: float | None
    itl_p99: float | None
    running: int | None = None
    waiting: int | None = None
    kv_cache_usage: float | None = None
    lora_rows_used: int | None = None
    acceptance_rate: float | None = None
    """Mean over the 30 seconds before."""
    acceptance_length: float | None = None


class QueueFacts(BaseModel):
    """Sequences."""

    running: int
    waiting: int
    waiting_by_reason: dict[str, int]
    preemptions: int


class CacheFacts(BaseModel):
    """The KV cache."""

    usage: float
    prefix_queries: int
    """Prompt tokens looked up."""
    prefix_hits: int


class LoraFacts(BaseModel):
    """All adapters together."""

    rows: int
    rows_used: int
    host_bytes: int
    registered: int
    on_device: int
    in_host_memory: int
    load_failures: int


class Acceptance(BaseModel):
    """Speculation since the server started."""

    drafts: int
    """Verification rounds."""
    draft_tokens: int
    accepted_tokens: int
    rate: float | None
    length: float | None
    """Tokens a round: one more than the accepted ones."""
    per_position: list[float]
    """Share of the rounds in which the draft token at that position was accepted."""


class AdapterFacts(BaseModel):
    """One adapter that is in memory or has been used; "" is the base model."""

    name: str
    tier: str | None
    """"device", "host" or "disk"; null for the base model and for sums of adapters."""
    rank: int
    rows: int
    bytes: int
    pinned: bool
    draft: str
    """"loaded" if it has draft weights that are in use, else why not; "" without any."""
    running: int
    waiting: int
    output_tokens_per_second: float
    acceptance: Acceptance | None
    with_draft_weights: Acceptance | None
    """Part of `acceptance` that was counted while its own draft weights were in use."""
    without_draft_weights: Acceptance | None
    """Part of `acceptance` that was counted while they were not in use."""


class TenantFacts(BaseModel):
    """One tenant's traffic now, for those that have any."""

    tenant: str
    output_tokens_per_second: float


class Stats(BaseModel):
    """Statistics of one moment; made at most once a second, for all callers."""

    time: float
    """Since the epoch."""
    server: ServerFacts
    live: Point
    queue: QueueFacts
    kv_cache: CacheFacts
    lora: LoraFacts
    speculation: Acceptance | None
    tokens_by_drafter: dict[str, int]
    """Tokens of sampling steps by the drafter whose drafts they verified; "off": of steps without drafts."""
    adapters: list[AdapterFacts]
    """The busiest ones; the base model first."""
    adapters_left_out: int
    tenants: list[TenantFacts]
    history: list[Point] | None = None
    """The seconds before, the oldest first, if requested."""
