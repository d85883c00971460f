"""One measurement of speculation from options to a report: prompts, engines, rounds."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .....models.checkpoint.loader import read_facts
from .....models.checkpoint.paths import resolve_model_path
from .....models.checkpoint.tokenizer import eos_token_ids, load_tokenizer
from .....models.demo import demo_model_path
from ....core.config import EngineArgs
from ....core.errors import PromptTooLongError
from ....core.interrupt import Interrupt
from ....engine.engine_core import EngineCore
from ...adapter_rank import largest_rank
from ..bench_options import is_demo
from ..engine_runs import BLOCK_SIZE, freeze_heap, num_blocks
from ..machine import describe_machine, describe_model, labels
from ..prompt_files import read_prompts
from .modes import ORACLE, Mode
from .rounds import ModeEngine, Plan, measure, record_answers
from .tasks import Task, make_tasks, random_task, without_draft_weights


def measure_speculation(
    options: argparse.Namespace, modes: Sequence[Mode], adapters: Mapping[str, str], scratch: Path
) -> dict[str, Any]:
    """Measure `modes` of a model. Every mode has an engine with its own copy of the weights; all are in memory at once.

    Args:
        options: the command's.
        adapters: name -> folder.
        scratch: an empty folder for copies of adapters.

    Raises:
        OutriderError: whatever is wrong with options, models or adapters.
    """
    path = demo_model_path() if is_demo(options.model) else resolve_model_path(options.model)
    tokenizer = load_tokenizer(path)
    prompts = read_prompts(options.prompts, "prompts") if options.prompts is not None else None
    tasks = [without_draft_weights(t, scratch) for t in make_tasks(tokenizer, adapters, prompts, options.tasks)]
    loras = [lora for task in tasks for lora in (task.adapter, task.bare) if lora is not None]
    facts = read_facts(path)
    if options.random_text:
        tasks.append(random_task(facts.vocab_size, set(tokenizer.all_special_ids)))
    rates, dummy = options.synthetic_acceptance, options.load_format == "dummy"
    plan = Plan(
        batch_sizes=tuple(options.batch_sizes),
        rounds=options.rounds,
        max_tokens=options.max_tokens,
        queue=options.queue,
        ignore_eos=rates is not None or dummy,
        eos_token_ids=tuple(sorted(e for e in eos_token_ids(path, tokenizer) if e < facts.vocab_size)),
    )
    num_drafts = max(mode.config.get("num_speculative_tokens", 0) for mode in modes)
    shared = _engine_options(options, tasks, num_drafts, facts.max_position_embeddings)
    if loras:
        rank = max(largest_rank(Path(lora.path)) for lora in loras)
        shared |= {"enable_lora": True, "max_loras": len(loras), "max_lora_rank": rank}
    engines: list[ModeEngine] = []
    with Interrupt() as interrupt, ExitStack() as stack:
        for mode in modes:
            if mode.method == ORACLE:  # the engine of off is there: it comes first
                answers = scratch / "answers.jsonl"
                record_answers(engines[0], tasks, plan, answers)
                mode.config["model"] = str(answers)
            core = EngineCore(EngineArgs(model=str(path), speculative_config=mode.config, **shared))
            stack.callback(core.shutdown)
            engines.append(ModeEngine(mode, core))
            for lora in loras:
                core.adapters.load(lora)
            if interrupt.wanted is not None:  # nothing is measured yet
                raise interrupt.error()
        freeze_heap()
        measured = measure(engines, tasks, plan, stops=lambda: interrupt.wanted is not None)
    cut = [measured.cut] if measured.cut else []
    return {
        "labels": [*cut, *labels(synthetic=rates, random_weights=dummy)],
        "cut": measured.cut,
        "signal": interrupt.wanted,
        "synthetic_acceptance_rates": rates,
        "machine": describe_machine(),
        "model": describe_model(options.model, engines[0].core.info),
        "settings": {
            **{name: getattr(options, name) for name in ("max_tokens", "rounds", "queue")},
            "num_speculative_tokens": num_drafts,
            "modes": {mode.name: {k: v for k, v in mode.config.items() if k != "model"} for mode in modes},
        },
        "rows": measured.rows,
    }


def _engine_options(options: argparse.Namespace, tasks: Sequence[Task], num_drafts: int, limit: int) -> dict[str, Any]:
    """The options of all engines. Their KV caches hold the largest batch and no more: all are in memory at once."""
    longest = max(len(prompt) for task in tasks for prompt in task.prompts)
    length, max_batch = longest + options.max_tokens, max(options.batch_sizes)
    if length > limit:
        raise PromptTooLongError(
            f"the longest prompt has {longest} tokens; with {options.max_tokens} more it exceeds the model's {limit}",
            param="max_tokens",
        )
    return {
        **{name: getattr(options, name) for name in ("dtype", "device", "quantization", "load_format")},
        "max_model_len": length,
        "max_num_seqs": max_batch,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": num_blocks(length + num_drafts) * max_batch,
        "enable_prefix_caching": False,
    }
