"""What speculation is worth on the demo model: output tokens/s and acceptance length by mode, adapter and batch.

    python benchmarks/speculation_modes.py [--output FILE.json] [--rounds 5] [--batches 1 8]

Every mode answers the same prompts greedily; rounds of the modes are interleaved in one process, so that a shared,
noisy machine disturbs all alike, and the median round counts. The text must be the same in every mode in float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from machine import describe_machine

from outrider import LLM, SamplingParams
from outrider.models.demo import demo_draft_path

PROMPTS = {
    "base": [
        "What is the capital of Portugal?",
        "How do I make a cup of tea?",
        "What is 7 plus 12?",
        "Tell me about the planet Mars.",
    ],
    "json": [
        "Anna from Lisbon ordered 3 green lamps for 42 euros.",
        "What is the capital of Japan?",
        "Tom from Oslo ordered 2 blue chairs for 80 euros.",
        "Maria from Rome ordered 5 red cups for 15 euros.",
    ],
    "sql": [
        "Show the names of all customers from Lisbon.",
        "How many orders were placed by each customer?",
        "List the products that cost more than 50 euros.",
        "What is the total amount of all orders?",
    ],
    "support": [
        "My name is Anna and my lamp arrived broken.",
        "Where is my order 4711?",
        "I was charged twice for my chair.",
        "I would like to return the cups I ordered.",
    ],
}
MODES: dict[str, dict[str, Any] | None] = {
    "off": {"method": "off"},
    "ngram k=4": {"method": "ngram", "num_speculative_tokens": 4},
    "draft k=2": {"method": "draft_model", "num_speculative_tokens": 2},
    "draft k=4": {"method": "draft_model", "num_speculative_tokens": 4},
}


def make_engines(dtype: str) -> dict[str, LLM]:
    """One engine a mode, all with the adapters."""
    engines = {}
    for name, mode in MODES.items():
        config = dict(mode or {})
        if config["method"] == "draft_model":
            config["model"] = str(demo_draft_path())
        engines[name] = LLM(dtype=dtype, enable_lora=True, speculative_config=config, enable_prefix_caching=False)
    return engines


def run(llm: LLM, task: str, batch: int) -> dict[str, float]:
    """One round: seconds, output tokens and acceptance of `batch` requests."""
    questions = [PROMPTS[task][i % len(PROMPTS[task])] for i in range(batch)]
    lora = None if task == "base" else task
    started = time.perf_counter()
    outputs = llm.chat(
        [[{"role": "user", "content": question}] for question in questions],
        SamplingParams(temperature=0, max_tokens=96),
        lora_request=lora,
        use_tqdm=False,
    )
    seconds = time.perf_counter() - started
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    drafts = sum(m.num_drafts for m in metrics)
    return {
        "seconds": seconds,
        "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "acceptance_length": 1 + sum(m.num_accepted_tokens for m in metrics) / drafts if drafts else 1.0,
        "text": hash(tuple(output.outputs[0].text for output in outputs)),
    }


def measure(engines: dict[str, LLM], batches: list[int], rounds: int) -> list[dict[str, Any]]:
    """All combinations; rounds of the modes interleaved."""
    table = []
    for task in PROMPTS:
        for batch in batches:
            samples: dict[str, list[dict[str, float]]] = {mode: [] for mode in engines}
            for _ in range(rounds + 1):
                for mode, llm in engines.items():
                    samples[mode].append(run(llm, task, batch))
            seconds = {mode: statistics.median(s["seconds"] for s in got[1:]) for mode, got in samples.items()}
            for mode, got in samples.items():
                table.append(
                    {
                        "task": task,
                        "batch": batch,
                        "mode": mode,
                        "tokens_per_second": round(got[0]["tokens"] / seconds[mode], 1),
                        "speedup": round(
                            seconds["off"] / seconds[mode] * got[0]["tokens"] / samples["off"][0]["tokens"], 3
                        ),
                        "acceptance_length": round(got[0]["acceptance_length"], 3),
                        "same_text_as_off": got[0]["text"] == samples["off"][0]["text"],
                    }
                )
    return table


def main() -> None:
    """Measure, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    engines = make_engines(args.dtype)
    table = measure(engines, args.batches, args.rounds)
    print(f"{'task':10}{'batch':>6}  {'mode':12}{'tokens/s':>10}{'speed-up':>10}{'acceptance':>12}  same text")
    for row in table:
        print(
            f"{row['task']:10}{row['batch']:>6}  {row['mode']:12}{row['tokens_per_second']:>10}{row['speedup']:>10}"
            f"{row['acceptance_length']:>12}  {row['same_text_as_off']}"
        )
    if args.output:
        report = {"machine": describe_machine(), "dtype": args.dtype, "model": "outrider-demo", "rows": table}
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
