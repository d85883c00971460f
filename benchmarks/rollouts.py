"""Rollouts: n answers to one prompt that draft for each other, compared with no drafts and with each answer alone.

    python benchmarks/rollouts.py --model MODEL [--output-json benchmarks/results/rollouts.json] [--n 8,16,32,64]

Modes, each an engine of its own: `off`; `own text`, adaptive prompt lookup in each answer alone; `group`, the same with
the answers of the request; `4 drafts`, a fixed number from the answers.

The modes answer each prompt in turn with the same seeds, so they must give the same text. Speed-ups are tokens/s over
`off`, of all prompts together, by the clock and by processor time, which other work on the machine disturbs less.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from checkout import use_checkout

use_checkout()

from script import make_parser, settings_of, write_result  # noqa: E402

from outrider import LLM, SamplingParams  # noqa: E402
from outrider.platform.cli.bench.request_figures import acceptance  # noqa: E402
from outrider.platform.core.messages import SpeculationCounts  # noqa: E402

CLAIM = "Answers to one prompt that draft for each other: acceptance and speed by number of answers and temperature"
PROMPTS = {
    "maths": (
        "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips "
        "did Natalia sell altogether in April and May? Think step by step.",
        "A baker makes 12 trays of 15 rolls each morning. He sells 140 rolls and gives 13 to a school. How many rolls "
        "are left? Explain each step.",
        "A train travels 60 km in 45 minutes. How far does it travel in 3 hours at the same speed? Show your work.",
    ),
    "code": (
        "Write a Python function is_palindrome(text) that ignores case and spaces. Give only the code.",
        "Write a Python function that returns the largest even number in a list, or None if there is none.",
        "Write a Python function that counts how often each word occurs in a text and returns a dictionary.",
    ),
    "rewriting": (
        "Correct the grammar of this text: She go to school every day and she have two brother. Yesterday they was "
        "playing football in the park.",
        "Rewrite in a formal tone: hey, can't make it to the meeting tomorrow, my car broke down again. can we move it "
        "to friday?",
        "Summarise in two sentences: The city council decided on Monday to close the old bridge for repairs. The work "
        "will take six months and cost two million euros. Buses will use another road.",
    ),
}
LOOKUP = {"method": "ngram", "adaptive": True, "num_speculative_tokens": 16}
MODES: dict[str, dict[str, Any]] = {
    "off": {"method": "off"},
    "own text": LOOKUP | {"group_drafts": "off"},
    "group": LOOKUP | {"group_drafts": "request"},
    "4 drafts": {"method": "ngram", "num_speculative_tokens": 4, "group_drafts": "request"},
}
MAX_LENGTH = 256


@dataclass
class Figures:
    """Sums over the prompts of a cell."""

    num_tokens: int = 0
    seconds: float = 0.0
    processor_seconds: float = 0.0
    same: int = 0
    """Answers whose tokens are those of `off`."""
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)


Texts = list[list[int]]


def answer(llm: LLM, prompt: str, params: SamplingParams) -> tuple[Texts, SpeculationCounts]:
    """Token ids of `params.n` answers to a prompt, in one request."""
    (output,) = llm.chat([[{"role": "user", "content": prompt}]], params, use_tqdm=False)
    counts = SpeculationCounts()
    counts.add(output.metrics)
    return [list(completion.token_ids) for completion in output.outputs], counts


def cells(modes: dict[str, LLM], options: Any) -> Iterator[list[dict[str, Any]]]:
    """Rows of each number of answers and temperature, by mode, until the time is up."""
    end = time.perf_counter() + options.seconds
    for n in options.n:
        for temperature in options.temperatures:
            if time.perf_counter() > end:
                return
            found: dict[str, Figures] = defaultdict(Figures)
            by_kind: dict[str, dict[str, list[int]]] = {mode: {} for mode in modes}
            for number, (kind, prompt) in enumerate(prompts_of(options.prompts)):
                params = SamplingParams(n=n, temperature=temperature, seed=1000 * number, max_tokens=options.max_tokens)
                texts: dict[str, Texts] = {}
                for mode in list(modes)[:: 1 if number % 2 else -1]:  # none is always first
                    texts[mode] = measure(
                        modes[mode], prompt, params, found[mode], by_kind[mode].setdefault(kind, [0, 0])
                    )
                for mode, own in texts.items():
                    found[mode].same += sum(one == other for one, other in zip(own, texts["off"], strict=True))
            yield list(rows_of(found, by_kind, {"temperature": temperature, "n": n}))


def measure(llm: LLM, prompt: str, params: SamplingParams, figures: Figures, of_kind: list[int]) -> Texts:
    """Answer a prompt, and add to the figures of its cell; `of_kind`: accepted drafts and steps."""
    clock, processor = time.perf_counter(), time.process_time()
    texts, counts = answer(llm, prompt, params)
    figures.seconds += time.perf_counter() - clock
    figures.processor_seconds += time.process_time() - processor
    figures.num_tokens += sum(map(len, texts))
    figures.counts.add(counts)
    of_kind[0] += counts.num_accepted_tokens
    of_kind[1] += sum(counts.steps_by_k)
    return texts


def rows_of(found: dict[str, Figures], by_kind: dict[str, Any], cell: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of a cell, by mode."""
    off = found["off"]
    for mode in MODES:
        if mode not in found:
            continue
        own = found[mode]
        steps = sum(own.counts.steps_by_k)
        row = {
            **cell,
            "mode": mode,
            "tokens_per_second": round(own.num_tokens / own.seconds, 1),
            "speedup": round(own.num_tokens / own.seconds * off.seconds / off.num_tokens, 3),
            "speedup_by_processor_time": round(
                own.num_tokens / own.processor_seconds * off.processor_seconds / off.num_tokens, 3
            ),
            "same_text": own.same,
            "num_tokens": own.num_tokens,
            **acceptance(own.counts),
        }
        if steps:  # of all sampling steps, with and without drafts
            row["drafts_per_step"] = round(own.counts.num_draft_tokens / steps, 3)
            row["accepted_per_step"] = round(own.counts.num_accepted_tokens / steps, 3)
            row["accepted_per_step_by_kind"] = {
                kind: round(accepted / max(1, all_steps), 3) for kind, (accepted, all_steps) in by_kind[mode].items()
            }
        print(row, flush=True)
        yield row


def tabulated(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The table of the page: a line for each temperature and mode, a column for each number of answers."""
    sizes = sorted({row["n"] for row in rows})
    found = {(row["temperature"], row["mode"], row["n"]): row for row in rows}

    def cell(row: dict[str, Any] | None) -> str:
        if row is None:
            return ""
        return f"{row['speedup_by_processor_time']:.2f} ({1.0 + row.get('accepted_per_step', 0.0):.2f})"

    lines = [
        [f"temperature {temperature:g}, {mode}", *(cell(found.get((temperature, mode, n))) for n in sizes)]
        for temperature in sorted({row["temperature"] for row in rows}, reverse=True)
        for mode in MODES
        if mode != "off" and any((temperature, mode, n) in found for n in sizes)
    ]
    return {"head": ["", f"{sizes[0]} answers", *map(str, sizes[1:])], "rows": lines}


def prompts_of(count: int) -> list[tuple[str, str]]:
    """(kind, prompt), the first `count` of each kind."""
    return [(kind, prompt) for kind, prompts in PROMPTS.items() for prompt in prompts[:count]]


def numbers(text: str) -> list[int]:
    """Integers with commas between them."""
    return [int(word) for word in text.split(",")]


def start(modes: Sequence[str], options: Any) -> dict[str, LLM]:
    """Start an engine for each mode, and let it answer once."""
    most = max(options.n)
    engines = {}
    for mode in modes:
        llm = LLM(
            options.model,
            dtype="bfloat16",
            max_model_len=MAX_LENGTH,
            max_num_seqs=most,
            num_gpu_blocks_override=(most + 2) * MAX_LENGTH // 16,
            block_size=16,
            speculative_config=MODES[mode],
        )
        answer(llm, "Say hello.", SamplingParams(n=most, temperature=1.0, seed=1, max_tokens=8))
        engines[mode] = llm
    return engines


def main() -> None:
    """Measure, print and write the result."""
    parser = make_parser(__doc__, model=True)
    parser.add_argument("--n", type=numbers, default=[8, 16, 32, 64], help="answers to a prompt (default: 8,16,32,64)")
    parser.add_argument("--temperatures", type=lambda text: [float(one) for one in text.split(",")], default=[1.0, 0.6])
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=1, help="of each kind, at most 3 (default: %(default)s)")
    parser.add_argument("--modes", default=",".join(MODES), help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=300, help="no cell begins after these (default: %(default)s)")
    options = parser.parse_args()
    engines = start(
        list(dict.fromkeys(["off", *options.modes.split(",")])), options
    )  # the others are compared with off
    rows: list[dict[str, Any]] = []
    try:
        for found in cells(engines, options):
            rows += found  # written after each cell: a measurement that is cut keeps its rows
            values = {"settings": settings_of(options), "rows": rows, "table": tabulated(rows)}
            write_result(options.output_json, CLAIM, "rollouts", values)
    finally:
        for llm in engines.values():
            llm.shutdown()


if __name__ == "__main__":
    main()
