"""Options as users give them, and the frozen configuration that the engine is built from.

`resolve` is the only way from one to the other: a pure function over the options, facts about the model and the
machine, and a declared table of incompatible options.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import incompatibilities
from .compat.unsupported_options import accepts_unsupported_options
from .compat.vllm_options import ENGINE, plain_value
from .engine_options import CacheOptions, LoRAOptions, ModelOptions, SchedulingOptions, SpeculationOptions
from .errors import InvalidRequestError, invalid
from .kv_events import parse_kv_events
from .kv_size import cache_memory, num_device_blocks, num_host_blocks
from .option import declared_options
from .quantization import rounding
from .sizes import parse_bytes
from .speculative_config import SpeculativeConfig, parse_speculative
from .state_size import StateConfig, most_sequences, state_config


@accepts_unsupported_options(ENGINE)
@dataclass(kw_only=True)
class EngineArgs(ModelOptions, SchedulingOptions, CacheOptions, LoRAOptions, SpeculationOptions):
    """Engine options with the names that vLLM's users know."""

    def __post_init__(self) -> None:
        for name in ("dtype", "load_format", "model_impl", "quantization"):
            setattr(self, name, plain_value(name, getattr(self, name)))
        self.quantization = None if self.quantization in ("none", "None") else self.quantization
        for name, option in ENGINE_OPTIONS.items():
            if option.parse is not None and option.kind is int and getattr(self, name) is not None:
                setattr(self, name, option.parse(name, getattr(self, name)))


ENGINE_OPTIONS = declared_options(EngineArgs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a model that `resolve` uses, read from its config.json."""

    path: str
    architecture: str
    dtype: str
    """Data type of the stored weights: "float32", "bfloat16" or "float16"."""
    vocab_size: int
    max_position_embeddings: int
    """Context length in tokens, with the rope scaling."""
    kv_bytes_per_token: int
    """Bytes of one token's keys and values in all layers, of target and drafter, in their data types."""
    state_bytes: int = 0
    """Bytes of one state of all layers with a recurrent state; 0: there are none."""
    quantization: str | None = None
    """Method by which the stored weights are quantised; None: they are not."""
    num_drafts: int | None = None
    """Drafts a step that the drafter's files name; None: they name no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Facts about the machine that `resolve` uses."""

    device: str
    """"cpu" or "cuda"."""
    free_memory_bytes: int
    total_memory_bytes: int
    host_memory_bytes: int = 0
    """All memory of the host, or of the container if that has less; 0: unknown."""
    has_float8: bool = True
    """True when the kernels can read float8 on this device: a CPU, or a GPU of compute capability 8.9 or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache."""

    block_size: int
    num_blocks: int
    enable_prefix_caching: bool
    dtype: str = "auto"
    """"auto": the model's; or "fp8"."""
    num_host_blocks: int = 0
    """Blocks that the host keeps for the device; 0: it has no such memory."""
    always_swaps: bool = False
    """True: no times are compared."""
    states: StateConfig | None = None
    """Slots of recurrent states; None: the model has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FairConfig:
    """Prices of the fair policy, in any unit: only their ratios matter."""

    prompt_cost: float = 1.0
    """Price of a prompt token that the prefix cache does not have, when its request first starts."""
    output_cost: float = 2.0
    """Price of an output token."""
    rejected_draft_cost: float = 1.0
    """Price of a rejected draft. It is computed like a prompt token, together with others of its sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step and of the queue."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str
    enable_chunked_prefill: bool = True
    prompt_pacing: bool = False
    max_num_queued_reqs: int | None = None
    fair: FairConfig = FairConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Limits on adapters that run, and on those that the device and the host keep."""

    max_loras: int
    """Largest number of distinct adapters that run at once. An idle adapter stays on the device while there are
    rows."""
    max_cpu_loras: int
    """Largest number of adapters in host memory; those on the device are also there."""
    max_lora_rank: int
    memory_bytes: int | None = None
    """Device memory for rank rows; None: `max_loras * max_lora_rank` rows."""
    max_cpu_bytes: int | None = None
    """Host memory for adapters, in bytes; None: as many as `max_cpu_loras` allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Complete configuration of an engine."""

    model: str
    dtype: str
    device: str
    load_format: str
    model_impl: str
    quantization: str | None
    """Method by which weights are quantised while they are loaded; None: not at all."""
    seed: int
    max_logprobs: int
    cache: CacheConfig
    scheduler: SchedulerConfig
    lora: LoRAConfig | None
    speculative: SpeculativeConfig | None
    batch_invariant: bool = False
    enforce_eager: bool = False
    """True when nothing is captured in graphs."""
    async_scheduling: bool = False
    """True when a step is launched before the previous one has ended."""
    num_ranks: int = 1
    """Processes that compute the target, each its share."""
    executor_backend: str = "uni"
    """"mp", "ray", or "uni" for one rank."""


def check_args(args: EngineArgs) -> None:
    """Refuse options that are wrong whatever the model: `InvalidRequestError` with the option in `param`."""
    for name, option in ENGINE_OPTIONS.items():
        option.check(getattr(args, name))
    parse_kv_events(args.kv_events_config, args.data_parallel_rank)
    for holds, name, message in incompatibilities.OPTIONS:
        if holds(args):
            raise InvalidRequestError(message, param=name)


def _bytes(name: str, value: int | str | None) -> int | None:
    return None if value is None else parse_bytes(name, value)


def _lora_config(args: LoRAOptions) -> LoRAConfig | None:
    if not args.enable_lora:
        return None
    return LoRAConfig(
        max_loras=args.max_loras,
        max_cpu_loras=args.max_cpu_loras or max(4 * args.max_loras, 32),
        max_lora_rank=args.max_lora_rank,
        memory_bytes=_bytes("lora_memory", args.lora_memory),
        max_cpu_bytes=_bytes("max_cpu_lora_memory", args.max_cpu_lora_memory),
    )


def _cache_config(
    args: EngineArgs, facts: ModelFacts, hardware: Hardware, scheduler: SchedulerConfig, num_drafts: int
) -> CacheConfig:
    max_num_seqs, memory = scheduler.max_num_seqs, cache_memory(args, hardware)
    states = state_config(facts, max_num_seqs, num_drafts, memory)
    if states is not None:
        memory -= states.num_slots * facts.state_bytes
    return CacheConfig(
        block_size=args.block_size,
        num_blocks=num_device_blocks(args, facts, memory, scheduler.max_model_len, max_num_seqs),
        enable_prefix_caching=args.enable_prefix_caching,
        dtype="auto" if args.kv_cache_dtype == "auto" else "fp8",
        num_host_blocks=num_host_blocks(args, facts, hardware),
        always_swaps=args.preemption_mode == "swap",
        states=states,
    )


def _fair_config(args: SchedulingOptions) -> FairConfig:
    return FairConfig(
        prompt_cost=args.fair_prompt_cost,
        output_cost=args.fair_output_cost,
        rejected_draft_cost=args.fair_rejected_draft_cost,
    )


def resolve(args: EngineArgs, facts: ModelFacts, hardware: Hardware) -> EngineConfig:
    """The configuration for these options, model and machine. Pure.

    Raises:
        InvalidRequestError: an option is wrong or incompatible with another; `param` names it.
    """
    check_args(args)
    for excluded, name, message in incompatibilities.WITH_DEVICE:
        if excluded(args, hardware):
            raise InvalidRequestError(message, param=name)
    max_model_len = args.max_model_len or facts.max_position_embeddings
    if max_model_len > facts.max_position_embeddings:
        raise invalid(
            "max_model_len",
            f"{max_model_len} exceeds the model's context length of {facts.max_position_embeddings} tokens "
            "(max_position_embeddings, times the factor of a linear rope scaling; at most index_topk)",
        )
    on_cpu, is_divided = hardware.device == "cpu", args.tensor_parallel_size > 1
    speculative = parse_speculative(args.speculative_config, args.download_dir)
    if speculative is not None and not speculative.drafts_given and facts.num_drafts is not None:
        speculative = replace(speculative, num_speculative_tokens=facts.num_drafts)
    num_drafts = 0 if speculative is None else speculative.num_speculative_tokens
    seats = most_sequences(64 if on_cpu else 256, facts, num_drafts, cache_memory(args, hardware))
    max_num_seqs = args.max_num_seqs or seats
    batched = args.max_num_batched_tokens or (2048 if on_cpu else 8192)
    if not args.enable_chunked_prefill and batched < max_model_len:
        if args.max_num_batched_tokens is not None:
            raise invalid(
                "max_num_batched_tokens",
                f"{batched} is less than max_model_len {max_model_len}; without enable_chunked_prefill a prompt must "
                "fit one step",
            )
        batched = max_model_len
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        max_model_len=max_model_len,
        policy=args.scheduling_policy,
        enable_chunked_prefill=args.enable_chunked_prefill,
        prompt_pacing=args.prompt_pacing is not False and args.enable_chunked_prefill,
        max_num_queued_reqs=args.max_num_queued_reqs,
        fair=_fair_config(args),
    )
    return EngineConfig(
        model=facts.path,
        dtype=facts.dtype if args.dtype == "auto" else args.dtype,
        device=hardware.device,
        load_format=args.load_format,
        model_impl=args.model_impl,
        quantization=rounding(args.quantization, facts.quantization),
        seed=args.seed,
        max_logprobs=facts.vocab_size if args.max_logprobs == -1 else args.max_logprobs,
        cache=_cache_config(args, facts, hardware, scheduler, num_drafts),
        scheduler=scheduler,
        lora=_lora_config(args),
        speculative=speculative,
        batch_invariant=args.batch_invariant,
        enforce_eager=args.enforce_eager,
        async_scheduling=not (on_cpu or is_divided) if args.async_scheduling is None else args.async_scheduling,
        num_ranks=args.tensor_parallel_size,
        executor_backend=(args.distributed_executor_backend or "mp") if is_divided else "uni",
    )
