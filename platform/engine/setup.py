"""The composition root: from options to the parts of a running engine. Features are listed here and nowhere else."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...kernels.threads import use_pool
from ...lora.device.sites import AdapterHooks
from ...lora.manager import AdapterManager
from ...lora.reader import reader_client
from ...lora.target_draft import prepare_without_adapters
from ...models.batch import KVLayerSpec, LayerKV, allocate_kv
from ...models.checkpoint.json_files import read_model_config
from ...models.checkpoint.loader import ModelOptions, load_model, read_facts
from ...models.checkpoint.paths import resolve_model_path, tokenizer_path
from ...models.checkpoint.tokenizer import load_tokenizer
from ...models.config import DecoderConfig
from ...models.demo import demo_model_path
from ...models.implementation import read_config
from ...models.model import LanguageModel
from ...models.pass_graphs import PassGraphs
from ...models.states.memory import LayerStates, allocate_states
from ...spec_decode.control.factory import Speculation, make_speculation
from ...spec_decode.drafters.base import Drafter
from ...spec_decode.drafters.factory import (
    DrafterContext,
    check_drafter,
    draft_kv_bytes_per_token,
    make_drafter,
    named_drafts,
)
from ...spec_decode.learning.learner import Learner
from ..core.config import EngineArgs, EngineConfig, check_args, resolve
from ..core.errors import InvalidRequestError
from ..core.messages import EngineInfo
from ..core.speculative_config import parse_speculative
from ..core.threads import leaves_a_core_free, threads_for, usable_cores
from .description import describe, has_long_steps, weight_bytes
from .executor.base import Executor, LocalExecutor
from .executor.captured import AgreedGraphs, TargetPasses
from .features import NoAdapters, PrefixNamespaces, Vocabularies
from .hardware import find_hardware
from .learning import make_learner
from .load_memory import ADAPTERS, DRAFTER, KV_CACHE, SWAP_SPACE, WARM_UP, WEIGHTS, memory_for
from .memory.host_store import HostStore
from .pause import Pause
from .queue.scheduler import Scheduler
from .runner.device_queue import DeviceQueue
from .runner.graphs import capture_ahead, make_graphs
from .runner.model_runner import ModelRunner, RunnerParts
from .runner.rehearsal import rehearse_engine
from .sampling.grammars import Grammars
from .sampling.logits_edits import edit_draft_logits
from .sampling.sampler import Sampler
from .scheduling import make_scheduler
from .weights import WeightParts, Weights

if TYPE_CHECKING:
    from .executor.parallel import ParallelExecutor


_MAX_READERS = 8
"""Most adapters that are read at once. At 1.5 GB/s of digest a core they keep up with a fast disk (10 GB/s)."""


class EngineParts(NamedTuple):
    """Parts of `EngineCore`."""

    config: EngineConfig
    info: EngineInfo
    scheduler: Scheduler
    runner: ModelRunner
    adapters: AdapterManager | NoAdapters
    grammars: Grammars
    executor: Executor
    kv: list[LayerKV]
    """All layers of the KV cache, the drafter's too."""
    host: HostStore | None
    """Memory of `swap_space`, if there is any."""
    learner: Learner | None
    """Trains draft weights of tenants that opted in; None: none did."""
    pause: Pause
    weights: Weights


def build(args: EngineArgs, *, progress: bool = False) -> EngineParts:
    """Resolve the options, load the weights, allocate the memory and put the parts together.

    Raises:
        InvalidRequestError: an option is wrong; `param` names it. NotFoundError: no such model.
        UnsupportedModelError: an architecture that is not served.
    """
    started = time.perf_counter()
    check_args(args)
    path = _model_path(args)
    config = _resolve(args, path)  # wrong options are found before anything is loaded
    dtype = getattr(torch, config.dtype)
    check_drafter(config.speculative, read_config(read_model_config(path), dtype, config.model_impl), path)
    parallel = _start_ranks(config)
    try:
        return _build(args, path, config, parallel, progress=progress, started=started)
    except BaseException:
        if parallel is not None:
            parallel.close()
        raise


def _build(
    args: EngineArgs,
    path: Path,
    config: EngineConfig,
    parallel: ParallelExecutor | None,
    *,
    progress: bool,
    started: float,
) -> EngineParts:
    """Load the weights, allocate the memory and put the parts together. `parallel`: this process is rank 0 of it."""
    device, num_local = torch.device(config.device), 1 if parallel is None else parallel.num_local
    model = _load(config, path, parallel, progress=progress)
    _choose_threads(model, getattr(torch, config.dtype), num_local)
    graphs = None if model.state_layers else _make_graphs(config, parallel)  # states are read by index, on the host
    context = _drafter_context(config, model, graphs, parallel, progress=progress)
    speculation = _make_speculation(config, context, graphs if graphs is not None and graphs.captures(model) else None)
    drafter = speculation.drafter
    adapters = _make_adapters(config, model, speculation, parallel)
    captures = graphs is not None and graphs.captures(model)
    logits = graphs.token_logits(model.config.vocab_size, model.device) if captures and graphs is not None else None
    config = _resolve(args, path, num_local)  # again: the KV cache gets a share of the remaining memory
    kv = _allocate_kv(config, [*model.kv_layers, *drafter.needs.kv_layers])
    num_own = len(model.kv_layers)
    runs_target = drafter.needs.target_draft is not None
    drafter.bind(kv[:num_own] if runs_target else kv[num_own:], adapters.prepare_draft)
    moving = None if parallel is None else parallel.move_blocks
    with memory_for(SWAP_SPACE):
        host = HostStore(kv, config.cache.num_host_blocks, moving) if config.cache.num_host_blocks else None
    target_kv, preparers, passes = kv[: len(model.kv_layers)], (adapters.prepare, adapters.prepare_head), None
    if graphs is not None and logits is not None:
        passes = TargetPasses(graphs, model, target_kv, preparers, drafter.needs.aux_layers, logits)
    executor = _make_executor(config, model, target_kv, adapters, parallel, passes)
    runner = ModelRunner(
        RunnerParts(
            model,
            target_kv,
            _make_sampler(config),
            drafter,
            executor,
            adapters.prepare_head,
            DeviceQueue(device, asynchronous=config.async_scheduling),
            graphs,
            speculation.policy,
            host,
        )
    )
    remake = partial(make_drafter, context=dataclasses.replace(context, graphs=None, progress=False))
    weights = Weights(WeightParts(config, path, model, drafter, remake, adapters, parallel))
    grammars = Grammars(partial(_load_tokenizer, args, path), model.config.vocab_size)
    gates = [
        pause := Pause(),
        adapters,
        Vocabularies(model.config.vocab_size, adapters.vocab_size, drafts_with_weights=_has_weights(drafter)),
        grammars,
        PrefixNamespaces(adapters.namespace, model.rope.short_context),
    ]
    scheduler = make_scheduler(config, speculation, gates, host)
    with memory_for(WARM_UP):
        if passes is not None and graphs is not None:
            capture_ahead(graphs, executor, has_ranks=parallel is not None)
        rehearse_engine(config, scheduler, runner, speculation, adapters, model)
    if leaves_a_core_free():  # these would delay its requests later
        grammars.prepare()
        if has_long_steps(config, model):
            adapters.start_reader()
    info = describe(args, config, model, time.perf_counter() - started, parallel.weight_bytes if parallel else 0)
    learner = make_learner(config, model, drafter, adapters)
    return EngineParts(config, info, scheduler, runner, adapters, grammars, executor, kv, host, learner, pause, weights)


@memory_for(KV_CACHE)
def _allocate_kv(config: EngineConfig, layers: Sequence[KVLayerSpec]) -> list[LayerKV]:
    cache, dtype = config.cache, getattr(torch, config.dtype)
    return allocate_kv(layers, cache.num_blocks, cache.block_size, dtype, torch.device(config.device), cache.dtype)


@memory_for(KV_CACHE)
def _allocate_states(config: EngineConfig, model: LanguageModel) -> list[LayerStates]:
    """Memory of the model's layers with a recurrent state."""
    options = config.cache.states
    if options is None:
        return []
    return allocate_states(model.state_layers, options.num_slots, getattr(torch, config.dtype), config.device)


def _model_path(args: EngineArgs) -> Path:
    if args.model is None:
        return demo_model_path()
    return resolve_model_path(args.model, revision=args.revision, cache_dir=args.download_dir)


def _load_tokenizer(args: EngineArgs, path: Path) -> Any:
    if args.skip_tokenizer_init:
        raise InvalidRequestError(
            "structured_outputs need the tokenizer, which skip_tokenizer_init leaves out", param="structured_outputs"
        )
    return load_tokenizer(tokenizer_path(args, path))


def _start_ranks(config: EngineConfig) -> ParallelExecutor | None:
    """Start the other ranks, which load their shares from now on; None: there are none."""
    if config.num_ranks == 1:
        return None
    from .executor.parallel import ParallelExecutor

    return ParallelExecutor(config)


def _make_graphs(config: EngineConfig, parallel: ParallelExecutor | None) -> PassGraphs | None:
    """Graphs of the engine's passes, which all ranks have or none; None: nothing is captured."""
    graphs = make_graphs(config)
    if graphs is not None and parallel is not None:
        graphs.backend = AgreedGraphs(graphs.backend, parallel.ranks.agree)
    return graphs


def _make_executor(
    config: EngineConfig,
    model: LanguageModel,
    kv: list[LayerKV],
    adapters: AdapterManager | NoAdapters,
    parallel: ParallelExecutor | None,
    passes: TargetPasses | None,
) -> Executor:
    """Executor of the target's passes; with several ranks all of them have their memory then."""
    preparers = adapters.prepare, adapters.prepare_head
    states = _allocate_states(config, model)
    if parallel is None:
        return LocalExecutor(model, kv, preparers, passes, states)
    parallel.bind(model, kv, preparers, config, adapters.catalog.stats().num_rows, passes, states)
    return parallel


@memory_for(WEIGHTS)
def _load(config: EngineConfig, path: Path, parallel: ParallelExecutor | None, *, progress: bool) -> LanguageModel:
    return load_model(
        path,
        config.dtype,
        config.device,
        load_format=config.load_format,
        progress=progress,
        seed=config.seed,
        batch_invariant=config.batch_invariant,
        options=ModelOptions(config.model_impl, config.quantization, None if parallel is None else parallel.ranks),
    )


def _resolve(args: EngineArgs, path: Path, num_local: int | None = None) -> EngineConfig:
    """The configuration for the memory free now; the KV cache is sized for the layers of target and draft model.

    `num_local`: ranks on this machine, which share its memory; None: all."""
    facts = read_facts(
        path,
        None if args.dtype == "auto" else args.dtype,
        args.kv_cache_dtype,
        args.model_impl,
        args.tensor_parallel_size,
    )
    speculative = parse_speculative(args.speculative_config, args.download_dir)
    dtype = facts.dtype if args.dtype == "auto" else args.dtype
    kv_bytes = facts.kv_bytes_per_token + draft_kv_bytes_per_token(speculative, dtype, args.kv_cache_dtype, path)
    facts = dataclasses.replace(facts, kv_bytes_per_token=kv_bytes, num_drafts=named_drafts(speculative))
    hardware = find_hardware(args.device)
    size = num_local or args.tensor_parallel_size
    hardware = dataclasses.replace(hardware, host_memory_bytes=hardware.host_memory_bytes // size)
    if hardware.device == "cpu":
        hardware = dataclasses.replace(hardware, free_memory_bytes=hardware.free_memory_bytes // size)
    return resolve(args, facts, hardware)


def _choose_threads(model: LanguageModel, dtype: torch.dtype, num_ranks: int) -> None:
    """Set the number of threads, before anything is timed or packed for it. Ranks on a CPU share its cores."""
    if model.device.type == "cpu":
        count = max(1, threads_for(weight_bytes(model, dtype), torch.get_num_threads()) // num_ranks)
        if count != torch.get_num_threads():
            torch.set_num_threads(count)
        # The products are native.
        use_pool(all(linear.is_elsewhere or linear.packed.fuses_adapters for linear in model.linears()))


@memory_for(DRAFTER)
def _make_speculation(config: EngineConfig, context: DrafterContext, graphs: PassGraphs | None) -> Speculation:
    return make_speculation(config.speculative, context, None if graphs is None else graphs.grid.padded)


def _drafter_context(
    config: EngineConfig,
    target: LanguageModel,
    graphs: PassGraphs | None,
    parallel: ParallelExecutor | None,
    *,
    progress: bool,
) -> DrafterContext:
    return DrafterContext(
        target=target if parallel is None else parallel.as_target(target),
        model_path=config.model,
        device=config.device,
        dtype=config.dtype,
        load_format=config.load_format,
        quantization=config.quantization if config.device == "cpu" else None,
        seed=config.seed,
        progress=progress,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=config.scheduler.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        edit_logits=edit_draft_logits,
        graphs=graphs if parallel is None else None,  # embeddings and head are of all ranks
    )


@memory_for(ADAPTERS)
def _make_adapters(
    config: EngineConfig, model: LanguageModel, speculation: Speculation, parallel: ParallelExecutor | None
) -> AdapterManager | NoAdapters:
    """One manager for the target's adapters and their draft weights: they are loaded and dropped together.

    Raises:
        InvalidRequestError: there is no memory for the number of rows in the options, or the model takes no adapters.
    """
    drafter, policy = speculation
    target_draft = drafter.needs.target_draft
    if config.lora is None and target_draft is None:
        return NoAdapters()
    if isinstance(model.config, DecoderConfig) and model.config.folded_factors:
        raise InvalidRequestError(
            f"LoRA is not supported with a GGUF file of {model.config.architecture}: its factors are multiplied into "
            "the weights, and those of an adapter are not known; use the checkpoint that the file was made of",
            param="enable_lora" if target_draft is None else "speculative_config",
        )
    if config.lora is None:
        assert target_draft is not None
        dtype, device = getattr(torch, config.dtype), torch.device(config.device)
        return NoAdapters(prepare_without_adapters(model.linears(), target_draft, dtype, device))

    def forget(digest: bytes) -> None:
        drafter.forget_adapter(digest)
        if policy is not None:
            policy.forget(digest)

    hooks = AdapterHooks(
        embedding=model.embedding,
        score=model.score,
        draft_method=config.speculative.method if config.speculative is not None else "",
        draft_linears=drafter.needs.linears,
        target_draft=target_draft,
        on_gone=forget,
        batch_invariant=config.batch_invariant,
        reader_process=config.device == "cpu"
        and reader_client.shortens_steps(torch.get_num_threads(), long_steps=has_long_steps(config, model)),
        num_readers=_num_readers(config.device),
    )
    if config.speculative is not None and (learn := config.speculative.learn) is not None:
        hooks = hooks._replace(learnt_rank=learn.rank, num_learners=learn.max_learners)
    if parallel is not None:
        hooks = hooks._replace(on_write=parallel.write_adapter, on_free=parallel.free_adapter)
    return AdapterManager(model.linears(), config.lora, config.dtype, config.device, hooks)


def _num_readers(device: str) -> int:
    """Adapters that are read at once: on the cores that neither steps nor the API process need."""
    return max(1, min(_MAX_READERS, usable_cores() - (torch.get_num_threads() if device == "cpu" else 2)))


def _make_sampler(config: EngineConfig) -> Sampler:
    if config.speculative is None:
        return Sampler()
    return Sampler(
        always_invariant=config.speculative.rejection_sample_method == "invariant",
        synthetic_rates=config.speculative.synthetic_acceptance_rates,
    )


def _has_weights(drafter: Drafter) -> bool:
    needs = drafter.needs
    return bool(needs.linears or needs.kv_layers or needs.target_draft)
