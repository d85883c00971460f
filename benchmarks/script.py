"""Command line, rounds and result file that the scripts of this folder share."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outrider import LLM, LoRARequest, SamplingParams
from outrider.platform.cli.bench.machine import describe_machine


def make_parser(description: str | None, rounds: int | None = None, model: bool = False) -> argparse.ArgumentParser:
    """Parser with --output-json; with --rounds if their default is given, and --model if a script needs one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-json", "--output", type=Path, metavar="FILE", help="result file")
    if model:
        parser.add_argument("--model", required=True, help="folder of the model")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="(default: %(default)s)")
    return parser


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Options of a run as its result keeps them: models by name, without the result's path."""
    model = getattr(options, "model", None)
    return {
        name: Path(model).name if name == "model" and model else value
        for name, value in vars(options).items()
        if name != "output_json"
    }


def write_result(file: Path | None, claim: str, run: str, values: Mapping[str, Any]) -> None:
    """Write one run in the form of `results/`, with a description of the machine; nothing without a file."""
    if file is not None:
        result = {"claim": claim, "runs": [{"run": run, "machine": describe_machine(), **values}]}
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def logprobs_of(llm: LLM, texts: list[list[int]], loras: list[LoRARequest | None] | None = None) -> list[float]:
    """Log-probabilities of all tokens of `texts` except the first ones, each given the tokens before it."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], params, loras, use_tqdm=False)
    return [
        entry[token].logprob
        for output in outputs
        for token, entry in list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]
    ]


def in_turn(works: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Figures that each of the works returns in each round; the first round, a warm-up, is left out."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name in list(works)[:: 1 if number % 2 else -1]:  # none is always first
            found[name].append(works[name]())
    return {name: values[1:] for name, values in found.items()}


def ratio_of(above: list[float], below: list[float]) -> dict[str, Any]:
    """Ratios of the rounds, and their median."""
    ratios = [round(one / other, 3) for one, other in zip(above, below, strict=True)]
    return {"ratio": round(statistics.median(ratios), 3), "ratios": ratios}
