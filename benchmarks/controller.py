"""Output speed of adaptive speculation over none, beside another checkout's, interleaved in one run.

Each engine is a process of its own: `off`, `new` (this checkout) and, with --old, `old`, all with the same options. For
each batch size and text they generate in turn, in each round in another order, and wait while others do. `closed` is
one batch that drains (where it is smaller than four, several batches, one after another, of four prompts in all);
`queued` is three times as many requests as run at once. A ratio is the median of the rounds. With --fixed there is one
more engine for each given number of drafts, and `new/fixed` is the ratio to the fastest of them.

Usage: python benchmarks/controller.py --model MODEL --texts repetitive chat --batches 1 4 16 32 --json FILE
    [--old CHECKOUT] [--speculative JSON] [--fixed K ...] [--rounds N] [--max-tokens N] [--queues closed queued]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers.process import Worker

ROOT = Path(__file__).resolve().parent.parent
TOPICS = ("a fox", "the sea", "a kettle", "Lisbon", "the moon", "a library", "bees", "trains")
QUESTIONS = (
    "What is {}?",
    "Tell me about {}.",
    "Write a short story about {}.",
    "Why do people like {}?",
    "Give me a list of five facts about {}.",
    "Explain {} to a child, then explain it again.",
)
CLAIM = "Output speed of adaptive speculation over none"
ANSWER_SECONDS = 1800.0
TEXTS = ("repetitive", "chat", "base", "random")
QUEUED = 3
"""Requests for each seat where the queue is filled."""
FEWEST_PROMPTS = 4
"""Prompts of a cell at least: how often a text repeats itself differs from prompt to prompt."""


def prompts_of(text: str, tokenizer: Any, vocab_size: int, count: int) -> list[list[int]]:
    """`count` prompts in tokens: a sentence again and again, questions with or without a chat template, random ones."""
    found = []
    for index in range(count):
        topic = TOPICS[index % len(TOPICS)]
        if text == "random":
            found.append(random.Random(index).choices(range(10, vocab_size), k=32))
        elif text == "repetitive":
            sentence = f"The {index + 2} children told a story about {topic} and went home. "
            found.append(list(tokenizer.encode(sentence * 10)))
        else:
            question = QUESTIONS[index % len(QUESTIONS)].format(topic)
            messages = [{"role": "user", "content": question}]
            found.append(
                tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
            )
    return found


def serve(options: dict[str, Any]) -> None:
    """Answer each line {batch, text, queue} of stdin with one line {tokens, seconds} of stdout, in a child process."""
    from transformers import AutoTokenizer

    from outrider import LLM, SamplingParams

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print goes to stderr
    tokenizer = AutoTokenizer.from_pretrained(options["model"])
    llm: LLM | None = None
    batch_of_llm = 0
    print("{}", file=out, flush=True)
    for line in sys.stdin:
        cell = json.loads(line)
        if cell["batch"] != batch_of_llm:
            if llm is not None:
                llm.shutdown()
            batch_of_llm = cell["batch"]
            llm = LLM(
                options["model"],
                dtype="bfloat16",
                max_num_seqs=batch_of_llm,
                max_model_len=1024,
                enable_prefix_caching=False,
                speculative_config=options["speculative"],
            )
        assert llm is not None
        is_queued = cell["queue"] == "queued"
        count = QUEUED * batch_of_llm if is_queued else max(FEWEST_PROMPTS, batch_of_llm)
        prompts = prompts_of(cell["text"], tokenizer, llm.engine_info.vocab_size, count)
        is_random = cell["text"] == "random"
        params = [
            SamplingParams(
                temperature=float(is_random),
                seed=index if is_random else None,
                # Requests of a queue end at different times, as those of users do.
                max_tokens=options["max_tokens"] * (2 + index % 3) // 3 if is_queued else options["max_tokens"],
                ignore_eos=True,
            )
            for index in range(count)
        ]
        started = time.perf_counter()
        outputs = []
        at_once = count if is_queued else batch_of_llm
        for first in range(0, count, at_once):
            part = slice(first, first + at_once)
            asked = [{"prompt_token_ids": prompt} for prompt in prompts[part]]
            outputs += llm.generate(asked, params[part], use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps({"tokens": tokens, "seconds": seconds}), file=out, flush=True)


def start(name: str, checkout: Path, options: dict[str, Any], folder: Path) -> Worker:
    """Start the engine of a checkout. `folder` gets a link to the checkout and what the engine prints."""
    link = folder / name / "outrider"
    link.parent.mkdir()
    link.symlink_to(checkout, target_is_directory=True)
    environment = os.environ | {"PYTHONPATH": str(link.parent)}
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", json.dumps(options)]
    return Worker(command, environment, folder / f"{name}.log", ANSWER_SECONDS)


def measure(engines: dict[str, Worker], cell: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Speeds of all engines for one batch size, text and queue; a first round is left out."""
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            answer = engines[name].ask(cell)
            if number:
                speeds[name].append(answer["tokens"] / answer["seconds"])
    found: dict[str, Any] = {name: [round(speed, 1) for speed in its] for name, its in speeds.items()}
    numbers = [name for name in names if name.startswith("fixed")]
    fixed = max(numbers, key=lambda name: statistics.median(speeds[name]), default="")
    for name, base in (("new", "off"), ("old", "off"), ("new", "old"), ("new", fixed)):
        if name in speeds and base in speeds:
            ratios = [one / other for one, other in zip(speeds[name], speeds[base], strict=True)]
            found[f"{name}/{base.split()[0]}"] = round(statistics.median(ratios), 3)
    return cell | found


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of the model")
    parser.add_argument("--old", type=Path, help="another checkout, to compare with")
    parser.add_argument("--speculative", default='{"method": "ngram"}', metavar="JSON", help="of `old` and `new`")
    parser.add_argument("--fixed", nargs="+", type=int, default=[], metavar="K", help="engines that always draft K")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=["repetitive", "chat"])
    parser.add_argument("--queues", nargs="+", choices=["closed", "queued"], default=["closed"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="result file")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure all cells, print each, and write them."""
    args = parse_args()
    if args.serve:
        serve(json.loads(args.serve))
        return
    from outrider.platform.cli.bench.machine import describe_machine

    options = {"model": str(Path(args.model).resolve()), "max_tokens": args.max_tokens}
    speculative = json.loads(args.speculative)
    kinds = {"off": (ROOT, None), "new": (ROOT, speculative)}
    if args.old:
        kinds["old"] = (args.old.resolve(), speculative)
    for count in args.fixed:
        kinds[f"fixed {count}"] = (ROOT, speculative | {"num_speculative_tokens": count, "adaptive": False})
    cells = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        engines = {}
        for name, (checkout, config) in kinds.items():
            engines[name] = start(name, checkout, options | {"speculative": config}, Path(folder))
            stack.callback(engines[name].close)
        for batch in args.batches:
            for queue in args.queues if batch > 1 else ["closed"]:
                for text in args.texts:
                    found = measure(engines, {"batch": batch, "text": text, "queue": queue}, args.rounds)
                    cells.append(found)
                    print(json.dumps(found), flush=True)
                    if args.json:
                        run = {"run": Path(args.model).name, "machine": describe_machine(), "speculative": speculative}
                        result = {"claim": CLAIM, "runs": [run | {"max_tokens": args.max_tokens, "cells": cells}]}
                        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
