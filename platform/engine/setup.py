"""The composition root: from options to the parts of a running engine. Features are listed here and nowhere else."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...kernels.threads import use_pool
from ...lora.device.sites import AdapterHooks
from ...lora.manager import AdapterManager
from ...lora.reader import reader_client
from ...models.batch import LayerKV, allocate_kv
from ...models.checkpoint.loader import (
    ModelOptions,
    load_model,
    quantization_name,
    read_facts,
    resolve_model_path,
    tokenizer_path,
)
from ...models.checkpoint.tokenizer import load_tokenizer
from ...models.demo import demo_model_path
from ...models.implementation import implementation_of
from ...models.model import LanguageModel
from ...models.pass_graphs import PassGraphs
from ...spec_decode.control.factory import Speculation, make_speculation
from ...spec_decode.drafters.base import Drafter
from ...spec_decode.drafters.factory import DrafterContext, draft_kv_bytes_per_token
from ..core.config import EngineArgs, EngineConfig, check_args, resolve
from ..core.errors import InvalidRequestError
from ..core.messages import EngineInfo
from ..core.speculative_config import parse_speculative
from ..core.threads import LARGE_WEIGHTS, beside_a_server, threads_for
from .features import NoAdapters, PrefixNamespaces, Vocabularies
from .hardware import find_hardware
from .memory.block_pool import BlockPool
from .memory.host_store import HostStore
from .memory.host_tier import HostTier, SwapCost
from .memory.prefix_cache import PrefixCache
from .queue.gates import DraftLimits, Gate
from .queue.scheduler import Scheduler
from .runner.device_queue import DeviceQueue
from .runner.graphs import capture_ahead, make_graphs
from .runner.model_runner import ModelRunner, RunnerParts
from .runner.rehearsal import rehearse_adapter, rehearse_prompts
from .runner.warm_up import rehearse, warm_up
from .sampling.grammars import Grammars
from .sampling.logits_edits import edit_draft_logits
from .sampling.sampler import Sampler


class EngineParts(NamedTuple):
    """Parts of `EngineCore`."""

    config: EngineConfig
    info: EngineInfo
    scheduler: Scheduler
    runner: ModelRunner
    adapters: AdapterManager | NoAdapters
    grammars: Grammars
    kv: list[LayerKV]
    """All layers of the KV cache, the drafter's too."""
    host: HostStore | None
    """Memory of `swap_space`, if there is any."""


def build(args: EngineArgs, *, progress: bool = False) -> EngineParts:
    """Resolve the options, load the weights, allocate the memory and put the parts together.

    Raises:
        InvalidRequestError: an option is wrong; `param` names it. NotFoundError: no such model.
        UnsupportedModelError: an architecture that is not served.
    """
    started = time.perf_counter()
    check_args(args)
    path = _model_path(args)
    config = _resolve(args, path)  # all that is wrong with the options is found before anything is loaded
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    model = _load(config, path, progress)
    _choose_threads(model, dtype)
    graphs = make_graphs(config)
    speculation = make_speculation(config.speculative, _drafter_context(config, model, graphs, progress))
    drafter = speculation.drafter
    adapters = _make_adapters(config, model, speculation)
    logits = None
    if graphs is not None and graphs.captures(model):
        logits = graphs.token_logits(model.config.vocab_size, model.device)
    config = _resolve(args, path)  # again: the KV cache gets of the memory that all that was made so far has left
    layers = [*model.kv_layers, *drafter.needs.kv_layers]
    cache = config.cache
    kv = allocate_kv(layers, cache.num_blocks, cache.block_size, dtype, device, cache.dtype)
    drafter.bind(kv[len(model.kv_layers) :], adapters.prepare_draft)
    host = HostStore(kv, cache.num_host_blocks) if cache.num_host_blocks else None
    sampler = _make_sampler(config)
    runner = ModelRunner(
        RunnerParts(
            model,
            kv[: len(model.kv_layers)],
            sampler,
            drafter,
            adapters.prepare,
            adapters.prepare_head,
            DeviceQueue(device, asynchronous=config.async_scheduling),
            graphs,
            logits,
            speculation.policy,
            host,
        )
    )
    grammars = Grammars(partial(_load_tokenizer, args, path), model.config.vocab_size)
    gates = [
        adapters,
        Vocabularies(model.config.vocab_size, adapters.vocab_size, drafts_with_weights=_has_weights(drafter)),
        grammars,
        PrefixNamespaces(adapters.namespace, model.rope.short_context),
    ]
    scheduler = _make_scheduler(config, speculation, gates, host)
    _warm_up(config, scheduler, runner, speculation, adapters, model)
    if beside_a_server() and _has_long_steps(config, model):
        adapters.start_reader()
    info = _describe(args, config, model, time.perf_counter() - started)
    return EngineParts(config, info, scheduler, runner, adapters, grammars, kv, host)


def _model_path(args: EngineArgs) -> Path:
    if args.model is None:
        return demo_model_path()
    return resolve_model_path(args.model, revision=args.revision, cache_dir=args.download_dir)


def _load_tokenizer(args: EngineArgs, path: Path) -> Any:
    return load_tokenizer(tokenizer_path(args, path))


def _load(config: EngineConfig, path: Path, progress: bool) -> LanguageModel:
    return load_model(
        path,
        config.dtype,
        config.device,
        load_format=config.load_format,
        progress=progress,
        seed=config.seed,
        batch_invariant=config.batch_invariant,
        options=ModelOptions(config.model_impl, config.quantization),
    )


def _resolve(args: EngineArgs, path: Path) -> EngineConfig:
    """The configuration for the memory free now; the KV cache is sized for the target's layers and a draft model's."""
    facts = read_facts(path, None if args.dtype == "auto" else args.dtype, args.kv_cache_dtype, args.model_impl)
    speculative = parse_speculative(args.speculative_config, args.download_dir)
    dtype = facts.dtype if args.dtype == "auto" else args.dtype
    drafters = draft_kv_bytes_per_token(speculative, dtype, args.kv_cache_dtype)
    facts = dataclasses.replace(facts, kv_bytes_per_token=facts.kv_bytes_per_token + drafters)
    return resolve(args, facts, find_hardware(args.device))


def _choose_threads(model: LanguageModel, dtype: torch.dtype) -> None:
    """Before anything is timed or packed for a number of threads."""
    if model.device.type == "cpu":
        count = threads_for(_weight_bytes(model, dtype), torch.get_num_threads())
        if count != torch.get_num_threads():
            torch.set_num_threads(count)
        use_pool(all(linear.packed.fuses_adapters for linear in model.linears()))  # the products are native


def _weight_bytes(model: LanguageModel, dtype: torch.dtype) -> int:
    """Bytes of the weights as they are held. A plain table that is tied to the head counts once: a step reads one."""
    linears, embedding = model.linears(), model.embedding
    packed = sum(linear.out_features * linear.in_features for linear in linears)
    table = embedding.vocab_size * embedding.hidden_size * (1 if embedding.tied else 2)
    others = max(0, model.num_parameters - packed - table) * dtype.itemsize
    return (
        sum(linear.packed.num_bytes for linear in linears) + min(embedding.num_bytes, table * dtype.itemsize) + others
    )


def _has_long_steps(config: EngineConfig, model: LanguageModel) -> bool:
    """Whether a step takes every core for so long that another process may come in between: on a CPU."""
    return config.device == "cpu" and _weight_bytes(model, getattr(torch, config.dtype)) >= LARGE_WEIGHTS


def _warm_up(
    config: EngineConfig,
    scheduler: Scheduler,
    runner: ModelRunner,
    speculation: Speculation,
    adapters: AdapterManager | NoAdapters,
    model: LanguageModel,
) -> None:
    """Do before the first request what it would wait for."""
    policy = speculation.policy
    if runner.captures:
        if policy is not None:
            policy.hold(0, 0)  # its drafts are captured when it measures what they take
        drafts = 0 if config.speculative is None else config.speculative.num_speculative_tokens
        try:
            capture_ahead(scheduler, runner, drafts)
        finally:
            if policy is not None:
                policy.release()
    if config.device != "cpu":
        if policy is not None:  # as many drafts as a step may have
            policy.hold(*max((choice for choice in policy.choices if choice[0] == 0), key=lambda choice: choice[1]))
        try:
            rehearse(scheduler, runner)
            rehearse_prompts(scheduler, runner)
            if config.lora is not None and isinstance(adapters, AdapterManager):
                method = "" if config.speculative is None else config.speculative.method
                rehearse_adapter(scheduler, runner, adapters, model, (method, speculation.drafter.needs.linears))
        finally:
            if policy is not None:
                policy.release()
    if policy is not None:
        warm_up(scheduler, runner, policy)


def _drafter_context(
    config: EngineConfig, target: LanguageModel, graphs: PassGraphs | None, progress: bool
) -> DrafterContext:
    return DrafterContext(
        target=target,
        model_path=config.model,
        device=config.device,
        dtype=config.dtype,
        load_format=config.load_format,
        seed=config.seed,
        progress=progress,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=config.scheduler.max_model_len,
        edit_logits=edit_draft_logits,
        graphs=graphs,
    )


def _make_adapters(config: EngineConfig, model: LanguageModel, speculation: Speculation) -> AdapterManager | NoAdapters:
    """One manager for the target's adapters and their draft weights: they are loaded and dropped together.

    Raises:
        InvalidRequestError: there is no memory for as many rows as the options want.
    """
    if config.lora is None:
        return NoAdapters()
    drafter, policy = speculation

    def forget(digest: bytes) -> None:
        drafter.forget_adapter(digest)
        if policy is not None:
            policy.forget(digest)

    hooks = AdapterHooks(
        embedding=model.embedding,
        draft_method=config.speculative.method if config.speculative is not None else "",
        draft_linears=drafter.needs.linears,
        on_gone=forget,
        batch_invariant=config.batch_invariant,
        reader_process=reader_client.pays(
            torch.get_num_threads() if config.device == "cpu" else 1,
            long_steps=_has_long_steps(config, model),
        ),
    )
    try:
        return AdapterManager(model.linears(), config.lora, config.dtype, config.device, hooks)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise InvalidRequestError(
            f"no memory for the adapters' rows: lower max_loras or max_lora_rank, or set lora_memory ({error})",
            param="max_lora_rank",
        ) from error


def _make_sampler(config: EngineConfig) -> Sampler:
    if config.speculative is None:
        return Sampler()
    return Sampler(
        always_invariant=config.speculative.rejection_sample_method == "invariant",
        synthetic_rates=config.speculative.synthetic_acceptance_rates,
    )


def _has_weights(drafter: Drafter) -> bool:
    needs = drafter.needs
    return bool(needs.linears or needs.kv_layers)


def _make_scheduler(
    config: EngineConfig,
    speculation: Speculation,
    gates: Sequence[Gate],
    host: HostStore | None,
) -> Scheduler:
    pool, options = BlockPool(config.cache.num_blocks), config.cache
    tier = None
    if host is not None:
        rate = None if options.always_swaps else host.bytes_per_second()
        tier = HostTier(options.num_host_blocks, SwapCost(host.block_bytes, options.block_size, rate))
    cache = PrefixCache(pool, options.block_size, tier)
    return Scheduler(config.scheduler, pool, cache, gates, _draft_limits(config, speculation), speculation.policy)


def _draft_limits(config: EngineConfig, speculation: Speculation) -> DraftLimits:
    options, needs = config.speculative, speculation.drafter.needs
    if options is None:
        return DraftLimits(overlaps=config.async_scheduling)
    most = options.num_speculative_tokens
    if speculation.policy is None:
        most = min(most, needs.max_drafts)
    return DraftLimits(
        most,
        extra_slots=bool(needs.kv_layers),
        # The host decides about synthetic acceptance.
        overlaps=config.async_scheduling and options.synthetic_acceptance_rates is None,
        max_positions=needs.max_positions,
        max_drafts_on_device=needs.max_drafts if needs.drafts_on_device else 0,
    )


def _describe(args: EngineArgs, config: EngineConfig, model: Any, load_seconds: float) -> EngineInfo:
    speculation = "off"
    if config.speculative is not None:
        most = "at most " if config.speculative.adaptive else ""
        speculation = f"{config.speculative.method}, {most}{config.speculative.num_speculative_tokens} drafts a step"
        if config.speculative.synthetic_acceptance_rates is not None:
            speculation += ", synthetic acceptance: the text is meaningless"
    return EngineInfo(
        model=config.model,
        architecture=model.config.architecture,
        dtype=config.dtype,
        device=config.device,
        vocab_size=model.config.vocab_size,
        max_model_len=config.scheduler.max_model_len,
        max_logprobs=config.max_logprobs,
        num_kv_blocks=config.cache.num_blocks,
        block_size=config.cache.block_size,
        num_parameters=model.num_parameters,
        enable_lora=config.lora is not None,
        max_loras=config.lora.max_loras if config.lora is not None else 0,
        max_lora_rank=config.lora.max_lora_rank if config.lora is not None else 0,
        speculation=speculation,
        load_seconds=load_seconds,
        kv_cache_dtype=config.cache.dtype,
        model_impl=implementation_of(model.config),
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_queued_reqs=config.scheduler.max_num_queued_reqs,
        quantization=quantization_name(config.model, model.config, config.quantization),
        weight_bytes=_weight_bytes(model, getattr(torch, config.dtype)),
    )
