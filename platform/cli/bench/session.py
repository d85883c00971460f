"""One measurement from options to a report: prompts, engines, rounds."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....models.checkpoint.json_files import read_json
from ....models.checkpoint.loader import read_facts, resolve_model_path
from ....models.checkpoint.tokenizer import eos_token_ids, load_tokenizer
from ....models.decoder import Decoder
from ...core.config import EngineArgs
from ...core.errors import OutriderError, PromptTooLongError
from ...core.lora_request import LoRARequest
from ...engine.engine_core import EngineCore
from .driver import BenchEngine, settle
from .machine import describe_machine, describe_model
from .measure import Plan, adapter_paths, measure, trial
from .modes import Mode, as_fixed
from .report import labels
from .workload import Task, make_tasks, random_task, read_prompts, without_draft_weights

_BLOCK_SIZE = 16


def measure_speculation(
    options: argparse.Namespace, modes: Sequence[Mode], model: str, adapters: Mapping[str, str], scratch: Path
) -> dict[str, Any]:
    """Measure `modes` of a model with the options of the command.

    Args:
        adapters: name -> folder.
        scratch: an empty folder for copies of adapters.

    Raises:
        OutriderError: whatever is wrong with options, models or adapters.
    """
    path = resolve_model_path(model)
    tokenizer = load_tokenizer(path)
    prompts = read_prompts(options.prompts) if options.prompts is not None else None
    tasks = [without_draft_weights(t, scratch) for t in make_tasks(tokenizer, adapters, prompts, options.tasks)]
    facts = read_facts(path)
    if options.random_text:
        tasks.append(random_task(facts.vocab_size, set(tokenizer.all_special_ids)))
    rates, dummy = options.synthetic_acceptance, options.load_format == "dummy"
    plan = Plan(
        batch_sizes=tuple(options.batch_sizes),
        rounds=options.rounds,
        max_tokens=options.max_tokens,
        ignore_eos=rates is not None or dummy,
        eos_token_ids=tuple(sorted(e for e in eos_token_ids(path, tokenizer) if e < facts.vocab_size)),
    )
    num_drafts = int(
        next((m.config["num_speculative_tokens"] for m in modes if "num_speculative_tokens" in m.config), 0)
    )
    shared = _engine_options(options, tasks, max(plan.batch_sizes), num_drafts, facts.max_position_embeddings)
    engines: list[BenchEngine] = []
    weights = _load_target(EngineArgs(model=str(path), **shared))

    def start(mode: Mode) -> BenchEngine:
        engine = BenchEngine(mode, EngineArgs(model=str(path), speculative_config=mode.config, **shared), weights)
        engines.append(engine)
        for name, folder in adapter_paths(tasks).items():
            engine.load_adapter(LoRARequest(name, path=folder))
        return engine

    try:
        by_mode = {mode.name: start(mode) for mode in modes if not mode.choices}
        tried: dict[str, float] = {}
        for mode in modes:
            if mode.choices:
                chosen, tried = _choose(mode, engines, start, tasks[0], plan)
                by_mode[mode.name] = start(chosen)
        running = [by_mode[mode.name] for mode in modes]
        settle()
        rows = measure(running, tasks, plan)
        model_facts = describe_model(running[0].core.info, path)
    finally:
        for engine in engines:
            engine.core.shutdown()
    return {
        "labels": labels(synthetic=rates, random_weights=dummy),
        "synthetic_acceptance_rates": rates,
        "machine": describe_machine(),
        "model": model_facts,
        "settings": {
            "num_speculative_tokens": num_drafts,
            "max_tokens": plan.max_tokens,
            "rounds": plan.rounds,
            "modes": {e.mode.name: {k: v for k, v in e.mode.config.items() if k != "model"} for e in running},
            "tokens_per_second_in_trial": tried,
        },
        "rows": rows,
    }


def _choose(
    mode: Mode, engines: list[BenchEngine], start: Callable[[Mode], BenchEngine], task: Task, plan: Plan
) -> tuple[Mode, dict[str, float]]:
    """Of `mode.choices` the one whose drafter is the fastest with a fixed number of drafts, and the tokens/s of each.
    `engines`: those that were started; others are started for the trial alone."""
    had = list(engines)
    fixed = {engine.mode.method: engine for engine in had if engine.mode.fixed}
    for choice in mode.choices:
        if choice.method not in fixed:
            fixed[choice.method] = start(as_fixed(choice))
    settle()
    speeds = trial([fixed[choice.method] for choice in mode.choices], task, plan)
    for engine in engines[len(had) :]:
        engine.core.shutdown()
    del engines[len(had) :]
    tried = {choice.method: round(speed, 1) for choice, speed in zip(mode.choices, speeds, strict=True)}
    return mode.choices[speeds.index(max(speeds))], tried


def _load_target(args: EngineArgs) -> Decoder:
    """One copy of the target's weights for all modes: in use, an engine has the processor's caches for itself.

    That of no mode: an engine that loaded the weights itself takes about 0.6% less time a step of the demo than those
    that were given them, whatever their mode, for reasons that have to do with where things lie in memory alone.
    """
    core = EngineCore(args)
    core.shutdown()
    return core.model.twin()  # without what the engine has for adapters


def _engine_options(
    options: argparse.Namespace, tasks: Sequence[Task], max_batch: int, num_drafts: int, limit: int
) -> dict[str, Any]:
    """What all engines have in common: room for the largest batch and no more, for many are in memory at once."""
    longest = max(len(prompt) for task in tasks for prompt in task.prompts)
    length = longest + options.max_tokens
    if length > limit:
        raise PromptTooLongError(
            f"the longest prompt has {longest} tokens; with {options.max_tokens} more it exceeds the model's {limit}",
            param="max_tokens",
        )
    blocks = -(-(length + num_drafts + 1) // _BLOCK_SIZE) + 1
    shared: dict[str, Any] = {
        "dtype": options.dtype,
        "device": options.device,
        "load_format": options.load_format,
        "max_model_len": length,
        "max_num_seqs": max_batch,
        "block_size": _BLOCK_SIZE,
        "num_gpu_blocks_override": blocks * max_batch,
        "enable_prefix_caching": False,
    }
    paths = adapter_paths(tasks)
    if paths:
        rank = max(largest_rank(Path(path)) for path in paths.values())
        shared |= {"enable_lora": True, "max_loras": len(paths), "max_lora_rank": rank}
    return shared


def largest_rank(folder: Path) -> int:
    """Of an adapter, its draft weights included; 1 where its files do not say: loading it will say what is wrong."""
    ranks = [1]
    for file in folder.rglob("adapter_config.json"):
        try:
            config = read_json(file)
            ranks += [int(config.get("r", 1)), *map(int, (config.get("rank_pattern") or {}).values())]
        except (OutriderError, ValueError, TypeError, AttributeError):
            continue
    return max(ranks)
