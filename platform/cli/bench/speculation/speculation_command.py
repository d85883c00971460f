"""`outrider bench speculation`: the speed of every drafter, side by side. Imports nothing heavy."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from .....models.demo import DEMO_MODEL_NAME, demo_adapters, demo_draft_path, demo_eagle3_path, demo_model_path
from ....core.speculative_config import MODEL_METHODS
from ..bench_options import adapter, add_engine_options, add_output_options, check_outputs, list_of, positive, publish
from .modes import MODES, available_modes, make_modes
from .tasks import check_adapter_names

_DESCRIPTION = """\
The same requests through each mode in one process. Rounds of the modes are interleaved, so that a noisy machine
disturbs all alike. Every mode has an engine with its own copy of the weights in memory. Without a model: the embedded
demo with its adapters, its drafters and prompts for each.
"""


def add_parser(kinds: Any) -> None:
    """Add the measurement `speculation`."""
    parser = kinds.add_parser(
        "speculation",
        help="speed of every drafter, and of adaptive drafting",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    _add_options(parser)
    parser.set_defaults(run=run)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="PATH", help="HF directory or hub id (default: the embedded demo)")
    add(
        "--modes",
        type=list_of(str),
        help=f"of {','.join(MODES)}, adaptive:METHOD, or METHOD:K for K drafts a step; adaptive alone has the EAGLE-3 "
        "head, else the draft model, else n-grams (default: all whose weights are there)",
    )
    for method in MODEL_METHODS:
        add("--" + method.replace("_", "-"), metavar="PATH", help=f"weights of the {method} drafter")
    add("--lora", metavar="NAME=PATH", type=adapter, action="append", help="an adapter; may be repeated")
    add("--tasks", type=list_of(str), help='of "base" and the adapters\' names (default: all)')
    lines = "lines with prompt, messages or prompt_token_ids, and adapter"
    add("--prompts", metavar="FILE.jsonl", type=Path, help=lines)
    add("--random-text", action="store_true", help="also random tokens at temperature 1, which no drafter can guess")
    add("--batch-sizes", type=list_of(positive), default=[1, 4, 16, 32], metavar="N,N", help="(default: 1,4,16,32)")
    add("--num-speculative-tokens", type=positive, default=4, metavar="K", help="drafts a step (default: 4)")
    add("--max-tokens", type=positive, default=96, metavar="N", help="output tokens a request (default: 96)")
    add("--rounds", type=positive, default=5, metavar="N", help="after one to warm up (default: 5)")
    queue = "requests over the batch size; each further one starts when another ends (default: 1, closed batches)"
    add("--queue", type=positive, default=1, metavar="N", help=queue)
    add_engine_options(parser)
    synthetic = "accept drafts at these rates, whatever they are; labelled as such"
    add("--synthetic-acceptance", type=list_of(float), metavar="R,R", help=synthetic)
    add_output_options(parser)


def run(namespace: argparse.Namespace) -> int:
    """Measure, print the table and write the files."""
    check_adapter_names([name for name, _ in namespace.lora or []])
    is_demo = namespace.model in (None, DEMO_MODEL_NAME)
    adapters = dict(namespace.lora or [])
    if is_demo and not adapters:
        adapters = {name: str(path) for name, path in demo_adapters().items()}
    models = _draft_models(namespace, is_demo)
    rates = namespace.synthetic_acceptance
    k = namespace.num_speculative_tokens if rates is None else len(rates)
    modes = make_modes(namespace.modes or available_modes(models), models, k, rates)
    check_outputs(namespace)

    from .speculation_plot import draw
    from .speculation_session import measure_speculation
    from .speculation_table import format_table

    with tempfile.TemporaryDirectory() as scratch:
        model = str(demo_model_path()) if is_demo else namespace.model
        name = DEMO_MODEL_NAME if is_demo else "/".join(Path(namespace.model).parts[-2:])
        report = measure_speculation(namespace, modes, model, adapters, Path(scratch))
    report["model"] = {"name": name, **report["model"]}
    publish(report, namespace, format_table, draw)
    return 0


def _draft_models(namespace: argparse.Namespace, is_demo: bool) -> dict[str, str]:
    """Weights of the drafters, method -> path: those given, else the demo's own."""
    given = {method: getattr(namespace, method) for method in MODEL_METHODS}
    if is_demo:
        shipped = {"draft_model": demo_draft_path(), "eagle3": demo_eagle3_path()}
        given |= {method: str(path) for method, path in shipped.items() if not given[method]}
    return {method: path for method, path in given.items() if path}
