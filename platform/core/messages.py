"""Messages between the client and the engine. Plain dataclasses: inside one process they are passed as they are,
between processes the client's IPC module encodes them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import NamedTuple

from .errors import ErrorInfo
from .lora_request import LoRA
from .sampling_params import SamplingParams

MAX_TENANT_WEIGHT = 1e6
"""Largest weight of a tenant; the smallest is its inverse."""


@dataclass(slots=True)
class EngineRequest:
    """One sequence to generate. The client has tokenized, validated and, for `n` > 1, split it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int] = field(default_factory=list)
    """End-of-sequence ids of the model; generation stops there unless `params.ignore_eos`."""
    lora: LoRA | None = None
    priority: int = 0
    """Lower runs first: under the priority policy, and among a tenant's own under the fair one."""
    tenant: str = ""
    weight: float = 1.0
    """Tenant's weight under the fair policy: with twice the weight it gets twice the service."""
    cache_salt: str = ""
    """Requests share cached prefixes only with the same salt."""
    num_shared_tokens: int = 0
    """Leading prompt tokens that are declared not secret: all tenants share the KV of blocks wholly inside."""
    group: str | None = None
    """Name shared by the sequences of one request with `n` > 1, which share the prompt's blocks."""
    arrival_time: float = 0.0


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, of the raw logits."""

    token_ids: list[int]
    """The token itself first, then the top ones, most likely first, or those of `logprob_token_ids`."""
    logprobs: list[float]
    """Aligned with `token_ids`."""
    rank: int
    """Rank of the token itself; 1 is the most likely."""
    ranks: list[int] | None = None
    """Ranks of the other tokens; None: these are the most likely ones, in their order."""


@dataclass(slots=True)
class PromptTable:
    """Log-probabilities of a prompt: None for its first token, then a `TokenLogprobs` for each. They are kept in arrays
    of P positions and W entries, because decoding a million lists and numbers would take a process a second."""

    width: int = 0
    """W; it is the same for all positions."""
    token_ids: bytearray = field(default_factory=bytearray)
    """[P, W] int32."""
    logprobs: bytearray = field(default_factory=bytearray)
    """[P, W] float64."""
    ranks: bytearray = field(default_factory=bytearray)
    """[P] int32."""

    def extend(self, positions: Sequence[TokenLogprobs]) -> None:
        """Append positions."""
        if positions:
            self.width = len(positions[0].token_ids)
        self.token_ids += array("i", chain.from_iterable(position.token_ids for position in positions)).tobytes()
        self.logprobs += array("d", chain.from_iterable(position.logprobs for position in positions)).tobytes()
        self.ranks += array("i", [position.rank for position in positions]).tobytes()

    def __len__(self) -> int:
        return 1 + len(memoryview(self.ranks).cast("i"))

    def __getitem__(self, index: int) -> TokenLogprobs | None:
        row = range(len(self))[index] - 1
        if row < 0:
            return None
        entries = slice(row * self.width, (row + 1) * self.width)
        token_ids, logprobs = memoryview(self.token_ids).cast("i"), memoryview(self.logprobs).cast("d")
        rank = memoryview(self.ranks).cast("i")[row]
        return TokenLogprobs(token_ids[entries].tolist(), list(map(float, logprobs[entries])), rank)


_RECENT = 64.0
"""Sampling steps over which `recent_drafts` is taken."""
_LISTS = ("accepted_per_pos", "steps_by_k", "drafts_by_drafter", "tokens_by_drafter")
"""Counts of `SpeculationCounts` by index."""


@dataclass(slots=True)
class SpeculationCounts:
    """Cumulative counts for one request, or for several: verification steps, draft tokens verified and accepted."""

    num_verifications: int = 0
    """Steps that verified at least one draft token; `num_drafts` in vLLM's metrics."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    steps_by_k: list[int] = field(default_factory=list)
    """Number of sampling steps that verified 0, 1, 2, ... drafts; empty if nothing is ever drafted."""
    drafts_by_drafter: list[int] = field(default_factory=list)
    """`num_verifications` of each drafter of the engine, in the order of `EngineStats.drafters`."""
    tokens_by_drafter: list[int] = field(default_factory=list)
    """Tokens that those steps generated: the accepted drafts, and one of the target's own if the text continues."""
    recent_drafts: float = field(default=0.0, compare=False)
    """Drafts a sampling step, a mean in which the weight of a step fades to 1/e over `_RECENT` later ones; of a sum,
    that of the counts added last."""

    def count(self, drafted: int, accepted: int, drafter: int = 0, generated: int | None = None) -> None:
        """Add one step that sampled: it verified `drafted` tokens of the drafter of this index, of which the first
        `accepted` were right. `generated`: its tokens, if they are not one more, as when the text ends on a draft."""
        self.recent_drafts += (drafted - self.recent_drafts) / _RECENT
        if drafted >= len(self.steps_by_k):
            _lengthen(self.steps_by_k, drafted + 1)
        self.steps_by_k[drafted] += 1
        if drafted == 0:
            return
        self.num_verifications += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        _lengthen(self.accepted_per_pos, drafted)
        for position in range(accepted):
            self.accepted_per_pos[position] += 1
        if drafter >= len(self.drafts_by_drafter):
            _lengthen(self.drafts_by_drafter, drafter + 1)
            _lengthen(self.tokens_by_drafter, drafter + 1)
        self.drafts_by_drafter[drafter] += 1
        self.tokens_by_drafter[drafter] += 1 + accepted if generated is None else generated

    def add(self, other: SpeculationCounts) -> None:
        """Add the counts of another."""
        self.num_verifications += other.num_verifications
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        for name in _LISTS:
            mine, theirs = getattr(self, name), getattr(other, name)
            _lengthen(mine, len(theirs))
            for index, number in enumerate(theirs):
                mine[index] += number
        self.recent_drafts = other.recent_drafts

    def by_drafter(self, drafters: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Sampling steps and the tokens that they generated, by the drafter of their drafts; "off": without drafts."""
        off = self.steps_by_k[0] if self.steps_by_k else 0
        made = zip(drafters, self.drafts_by_drafter, self.tokens_by_drafter, strict=False)
        return {"off": (off, off)} | {name: (steps, tokens) for name, steps, tokens in made}

    def since(self, earlier: SpeculationCounts) -> SpeculationCounts:
        """Counts since an earlier snapshot of the same run."""
        found = SpeculationCounts(
            self.num_verifications - earlier.num_verifications,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            recent_drafts=self.recent_drafts,
        )
        for name in _LISTS:
            pairs = zip_longest(getattr(self, name), getattr(earlier, name), fillvalue=0)
            setattr(found, name, [new - old for new, old in pairs])
        return found

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the draft tokens that were accepted; None without any."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def acceptance_length(self) -> float | None:
        """Mean number of tokens per verification step, the sampled one included; None without any."""
        return 1 + self.num_accepted_tokens / self.num_verifications if self.num_verifications else None

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of the verifications that accepted the first draft, the second one, ...; [] without any."""
        return (
            [accepted / self.num_verifications for accepted in self.accepted_per_pos] if self.num_verifications else []
        )


def _lengthen(numbers: list[int], length: int) -> None:
    numbers.extend([0] * (length - len(numbers)))


@dataclass(slots=True)
class SpeculationEntry:
    """Counts of one adapter's and tenant's requests."""

    adapter: str
    """"" for the base model."""
    tenant: str
    """"" for requests without one."""
    counts: SpeculationCounts


@dataclass(slots=True)
class LearningEntry:
    """State of the draft weights that are learnt from one tenant's requests for one adapter."""

    adapter: str
    """Its name in their first request; "" for the base model."""
    tenant: str
    digest: str
    """Digest of the learnt weights in use, in hex; "" while the adapter's own are used."""
    num_versions: int
    """Versions that have been in use."""
    num_dropped: int
    """Versions that were dropped because acceptance fell."""
    acceptance: float
    """Share of first drafts that were accepted under the weights in use."""
    acceptance_before: float | None
    """The same of the weights before them; None: too few were verified."""
    num_bytes: int
    """Bytes of recorded traffic."""
    failed: bool
    """True if an error has ended the training."""


@dataclass(slots=True)
class TokenDelta:
    """Tokens that one step added to one sequence. Exactly one delta of a sequence has a `finish_reason` or an `error`:
    its last."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    """Aligned with `token_ids` when the request asked for log-probabilities."""
    prompt_logprobs: PromptTable | None = None
    """Whole prompt, once, with the first delta."""
    finish_reason: str | None = None
    """"stop", "length", "repetition" or "abort"."""
    stop_reason: int | str | None = None
    """The stop token id that ended it (None for end-of-sequence), or "repetition_detected"."""
    error: ErrorInfo | None = None
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    speculation: SpeculationCounts | None = None
    """Cumulative, if drafts are proposed at all: the client may end the sequence after any delta."""
    num_draft_tokens: int = 0
    """Drafts that this step verified."""
    num_accepted: int = 0
    """Accepted drafts: the first `num_accepted` of `token_ids`; the model sampled the others."""
    adapter_digest: str = ""
    """Hexadecimal digest of the adapter's version that the sequence runs on; with the first delta."""
    queue_seconds: float = 0.0
    """Seconds from the request's arrival to its first step; with the first delta."""
    pooled: list[float] | None = None
    """Pooled hidden states of the prompt, not normalised, or probabilities of labels, of a request with `pooling`: in
    its only delta."""


@dataclass(slots=True)
class AdapterInfo:
    """One registered adapter as the engine knows it."""

    name: str
    path: str
    digest: str
    """Hexadecimal digest of its content; "" until its files have been read."""
    rank: int
    """Largest rank of the base model's modules."""
    rows: int
    """Rank rows that it takes on the device: more than `rank` if its draft weights have a larger one."""
    level: str
    """"device", "host" or "disk": the highest tier that holds it."""
    pinned: bool = False
    num_running: int = 0
    draft: str = ""
    """"loaded" when its draft weights are in use; "" when it has none for this engine's drafter; else why they are
    not used."""
    num_waiting: int = 0
    """Requests that wait to be admitted."""
    num_bytes: int = 0
    """Host memory that its content takes while loaded; 0 until its files have been read."""
    load_seconds: float = 0.0
    """Seconds that the last read of its files took; 0 until then."""


@dataclass(slots=True)
class AdapterTransfers:
    """Loads and evictions of one adapter, or of a mix, by level ("device" or "host"), since the engine started."""

    adapter: str
    loads: dict[str, int] = field(default_factory=dict)
    """Loads to a level: reads of its files, and writes of its rows."""
    evictions: dict[str, int] = field(default_factory=dict)
    """Evictions from a level, to make room for another adapter."""


@dataclass(slots=True)
class EngineStats:
    """A snapshot of the engine. Counters are cumulative since the engine started."""

    run_id: str = ""
    """Id of the engine's run. Counters restart with a new id."""
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_by_reason: dict[str, int] = field(default_factory=dict)
    num_preemptions: int = 0
    num_steps: int = 0
    resident_memory_bytes: int = 0
    """Resident memory of the engine's process; 0 if the system does not report it."""
    kv_cache_usage: float = 0.0
    """Share of KV blocks in use, 0 to 1; cached but unused blocks count as free."""
    prefix_cache_queries: int = 0
    """Prompt tokens looked up."""
    prefix_cache_hits: int = 0
    """Prompt tokens found."""
    kv_host_hits: int = 0
    """Tokens whose KV came back from host memory (`swap_space`), for new sequences and preempted ones."""
    kv_host_bytes: int = 0
    """Host memory of swapped KV."""
    kv_event_batches: int = 0
    """Batches of KV events, those dropped too."""
    kv_event_batches_dropped: int = 0
    """Batches that found the queue of the sender full."""
    drafters: list[str] = field(default_factory=list)
    """Methods of the drafters: the configured one, then its fallback if there is one."""
    speculation: list[SpeculationEntry] = field(default_factory=list)
    """Counts for each adapter and tenant whose requests may have drafts."""
    learning: list[LearningEntry] = field(default_factory=list)
    """Pairs of adapter and tenant whose draft weights learn, the least recently used first."""
    adapters: list[AdapterInfo] = field(default_factory=list)
    """Registered adapters that are in memory or in use; the others are on disk and cost nothing."""
    num_adapters: int = 0
    """Number of registered adapters, wherever they are."""
    running_adapters: list[str] = field(default_factory=list)
    waiting_adapters: list[str] = field(default_factory=list)
    lora_load_seconds: list[float] = field(default_factory=list)
    """Durations of adapter loads since the last snapshot."""
    lora_load_failures: int = 0
    """Loads that failed."""
    lora_evictions: dict[str, int] = field(default_factory=dict)
    """Evicted adapters, by the tier that they left: "device" or "host"."""
    lora_transfers: list[AdapterTransfers] = field(default_factory=list)
    """Loads and evictions of each adapter that was loaded."""
    lora_host_bytes: int = 0
    """Host memory of adapters, those unloaded but still running too."""
    lora_rows_used: int = 0
    """Rank rows of the device that adapters have."""
    lora_rows: int = 0
    """Rank rows of the device."""


@dataclass(slots=True)
class EngineInfo:
    """Facts about a started engine, sent to its clients once."""

    model: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    max_logprobs: int
    num_kv_blocks: int
    block_size: int
    num_parameters: int
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    speculation: str
    """Description: "off", or the method and the number of drafts."""
    load_seconds: float
    kv_cache_dtype: str = "auto"
    model_impl: str = "native"
    """"native" or "transformers": the code that computes the model."""
    max_num_seqs: int = 0
    max_num_queued_reqs: int | None = None
    quantization: str = ""
    """Description of the weights' format; "": they are not quantised."""
    weight_bytes: int = 0
    """Bytes of all weights as they are held, on all ranks together."""
    num_labels: int = 0
    """Labels of a classifier; 0: the model generates text."""
    has_tokenizer: bool = True
    """False under `skip_tokenizer_init`: prompts are token ids, and answers have no text."""
    tiles: str = ""
    """Description of the use of AMX tiles; "": the processor has none."""
    tensor_parallel_size: int = 1
    """Number of ranks."""
