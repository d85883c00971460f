"""`outrider bench speculation`: the speed of every drafter, side by side. Imports nothing heavy."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from .....models.demo import demo_adapters, demo_draft_path, demo_eagle3_path
from ....core.speculative_config import MODEL_METHODS
from ...options.option_types import list_of, positive
from ..bench_options import (
    Result,
    add_engine_options,
    add_measurement,
    add_model_options,
    given_adapters,
    is_demo,
)
from .modes import MODES, available_modes, make_modes
from .tasks import check_adapter_names

_DESCRIPTION = """\
The same requests through each mode in one process. Rounds of the modes are interleaved, so that a noisy machine
disturbs all alike. Every mode has an engine with its own copy of the weights in memory. Without a model: the embedded
demo with its adapters, its drafters and prompts for each.
"""


def add_parser(kinds: Any) -> None:
    """Add the measurement `speculation`."""
    short = "speed of every drafter, and of adaptive drafting"
    parser = add_measurement(kinds, "speculation", measure, _DESCRIPTION, short)
    add_model_options(parser)
    add = parser.add_argument
    add(
        "--modes",
        type=list_of(str),
        help=f"of {','.join(MODES)}, adaptive:METHOD, METHOD:K for K drafts a step, or adaptive:METHOD:K for at most "
        "K; adaptive alone has the EAGLE-3 head, else the draft model, else n-grams; oracle replays the answers of off "
        "as drafts, which are always right (default: all whose weights are there, without oracle and control)",
    )
    for method in MODEL_METHODS:
        add("--" + method.replace("_", "-"), metavar="PATH", help=f"weights of the {method} drafter")
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


def measure(options: argparse.Namespace) -> Result:
    """Measure with the options of the command."""
    adapters = given_adapters(options)
    check_adapter_names(adapters)
    demo = is_demo(options.model)
    if demo and not adapters:
        adapters = {name: str(path) for name, path in demo_adapters().items()}
    models = _draft_models(options, demo)
    rates = options.synthetic_acceptance
    if rates is not None:
        options.num_speculative_tokens = len(rates)
    modes = make_modes(options.modes or available_modes(models), models, options.num_speculative_tokens, rates)

    from .speculation_report import draw, format_table
    from .speculation_session import measure_speculation

    with tempfile.TemporaryDirectory() as scratch:
        report = measure_speculation(options, modes, adapters, Path(scratch))
    status = 128 + report["signal"] if report["cut"] else 0
    return Result(report, format_table(report), lambda file: draw(report, file), status)


def _draft_models(options: argparse.Namespace, demo: bool) -> dict[str, str]:
    """Weights of the drafters, method -> path: those given, else the demo's own."""
    given = {method: getattr(options, method) for method in MODEL_METHODS}
    if demo:
        shipped = {"draft_model": demo_draft_path(), "eagle3": demo_eagle3_path()}
        given |= {method: str(path) for method, path in shipped.items() if not given[method]}
    return {method: path for method, path in given.items() if path}
