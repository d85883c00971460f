"""Rate of near-ties that fall differently in a batch with other rows, and the price of batch invariance.

    python benchmarks/near_ties.py [--output-json F] [--questions 40] [--tokens 96] [--rounds 5]

Two parts, on the demo model and its adapters, in bfloat16:

- Flips. The reference is each question alone, without speculation. Every other way to compute the same (in a batch,
  with n-gram or draft-model drafts, with prompts in chunks) is compared with it, greedy and seeded. Up to its first
  different token a text has the reference's context, so the rate is first differences over the tokens compared; what
  follows one says nothing. Done without `batch_invariant`, and with it: then every text must be equal.
- Price. Tokens/s without and with `batch_invariant` by batch size, of decoding and of long prompts; rounds of the two
  engines are interleaved in one process, and the ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from script import in_turn, make_parser, ratio_of, write_result

from outrider import LLM, LoRARequest, SamplingParams
from outrider.models.demo import demo_adapters, demo_draft_path

CLAIM = "Texts that differ in bfloat16 from the same question alone, and the price of batch invariance"
NAMES = ["Anna", "Tom", "Maria", "Ben", "Lena"]
CITIES = ["Lisbon", "Oslo", "Rome", "Paris", "Vienna", "Cairo", "Tokyo"]
THINGS = ["lamp", "chair", "cup", "table", "clock", "bag"]
# Templates of questions by adapter; {n} counts.
TEMPLATES = {
    None: ["Tell me about {city}.", "What is {n} plus 12?", "How do I clean a {thing}?"],
    "json": ["{name} from {city} ordered {n} green {thing}s for 42 euros."],
    "sql": ["Show the names of all customers from {city}.", "List the {thing}s that cost more than {n} euros."],
    "support": ["My name is {name} and my {thing} arrived broken.", "Where is my order {n}? I am {name}."],
}
BATCH = 8
WAYS: dict[str, dict[str, Any]] = {
    "batch": {},
    "batch, prompts in chunks": {"max_num_batched_tokens": 16},
    "ngram k=4, alone": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "ngram k=4, batch": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "draft model k=4, alone": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 4}},
    "draft model k=4, batch": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 4}},
}

Question = tuple[str | None, str]
"""(adapter or None, question)"""
Texts = list[list[int]]


def make_questions(count: int) -> list[Question]:
    """Make `count` questions, with the adapters in turn."""
    made: list[Question] = []
    asked = {adapter: itertools.cycle(templates) for adapter, templates in TEMPLATES.items()}
    for number, adapter in zip(range(count), itertools.cycle(TEMPLATES), strict=False):
        words = {"name": NAMES[number % 5], "city": CITIES[number % 7], "thing": THINGS[number % 6], "n": number + 3}
        made.append((adapter, next(asked[adapter]).format(**words)))
    return made


def make_engine(batch_invariant: bool, options: dict[str, Any], dtype: str, max_num_seqs: int = BATCH) -> LLM:
    """Start an engine with the adapters and without the prefix cache, so that each text is computed in full."""
    options = dict(options)
    if options.get("speculative_config", {}).get("method") == "draft_model":
        options["speculative_config"] = options["speculative_config"] | {"model": str(demo_draft_path())}
    values = {"enable_lora": True, "enable_prefix_caching": False, "max_num_seqs": max_num_seqs, "dtype": dtype}
    return LLM(batch_invariant=batch_invariant, **(values | options))


def answer(llm: LLM, questions: Sequence[Question], params: Sequence[SamplingParams]) -> Texts:
    """Token ids of the answers to `questions`, which are sent together."""
    outputs = llm.chat(
        [[{"role": "user", "content": text}] for _, text in questions],
        list(params),
        lora_request=[LoRARequest(a, path=str(demo_adapters()[a])) if a else None for a, _ in questions],
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def all_texts(llm: LLM, questions: list[Question], tokens: int, alone: bool) -> dict[str, Texts]:
    """Answers, greedy and seeded, one by one or `BATCH` at a time."""
    texts: dict[str, Texts] = {}
    for kind, sampling in (("greedy", {"temperature": 0.0}), ("seeded", {"temperature": 0.8})):
        params = [
            SamplingParams(max_tokens=tokens, ignore_eos=True, **sampling, **({"seed": i} if kind == "seeded" else {}))
            for i in range(len(questions))
        ]
        size = 1 if alone else BATCH
        texts[kind] = []
        for start in range(0, len(questions), size):
            texts[kind] += answer(llm, questions[start : start + size], params[start : start + size])
    return texts


def compare(texts: Texts, reference: Texts) -> dict[str, Any]:
    """Number of texts that differ from the reference, and the rate per token."""
    differ = compared = 0
    for got, expected in zip(texts, reference, strict=True):
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(got, expected, strict=True)))
        differ += common < len(expected)
        compared += min(common + 1, len(expected))
    return {
        "texts": len(texts),
        "texts_that_differ": differ,
        "tokens_compared": compared,
        "flips_per_1000_tokens": round(1000 * differ / compared, 3),
        # No flip in n tokens: at most 3/n with 95% confidence.
        "at_most_per_1000_tokens": round(3000 / compared, 3) if not differ else None,
    }


def measure_flips(questions: list[Question], tokens: int, dtype: str) -> list[dict[str, Any]]:
    """Rows for each way to compute, kind of sampling and mode."""
    rows = []
    for invariant in (False, True):
        with make_engine(invariant, {}, dtype) as llm:
            reference = all_texts(llm, questions, tokens, alone=True)
        for way, options in WAYS.items():
            with make_engine(invariant, options, dtype) as llm:
                texts = all_texts(llm, questions, tokens, alone="alone" in way)
            for kind, got in texts.items():
                row = {"batch_invariant": invariant, "way": way, "sampling": kind}
                rows.append(row | compare(got, reference[kind]))
                print(_flip_line(rows[-1]), flush=True)
    return rows


def _flip_line(row: dict[str, Any]) -> str:
    return (
        f"{'invariant' if row['batch_invariant'] else 'usual':11}{row['way']:26}{row['sampling']:8}"
        f"{row['texts_that_differ']:>4} of {row['texts']:<5}{row['flips_per_1000_tokens']:>8.3f} / 1000 tokens"
    )


def measure_price(batches: list[int], rounds: int, tokens: int, dtype: str) -> list[dict[str, Any]]:
    """Rows for each kind of work and batch size, medians of the rounds; the first round is a warm-up."""
    engines = {name: make_engine(name == "invariant", {}, dtype, max(batches)) for name in ("usual", "invariant")}
    rows = []
    long = " ".join(text for _, text in make_questions(16))
    for (work, length), batch in itertools.product((("decode", tokens), ("prompt", 1)), batches):
        questions = make_questions(batch)
        if work == "prompt":
            questions = [(adapter, f"{text} {long}") for adapter, text in questions]
        params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)] * batch

        def seconds_of(llm: LLM, questions: list[Question] = questions, params: list[SamplingParams] = params) -> float:
            started = time.perf_counter()
            answer(llm, questions, params)
            return time.perf_counter() - started

        seconds = in_turn({name: partial(seconds_of, llm) for name, llm in engines.items()}, rounds)
        speeds = {f"{n}_per_second": round(batch * length / statistics.median(s), 1) for n, s in seconds.items()}
        row = {"work": work, "batch": batch, "unit": "tokens" if work == "decode" else "prompts", **speeds}
        rows.append(row | ratio_of(seconds["usual"], seconds["invariant"]))
        print(f"{work:8} batch {batch:<4} invariant / usual speed {rows[-1]['ratio']}", flush=True)
    for llm in engines.values():
        llm.shutdown()
    return rows


def main() -> None:
    """Measure both parts, print them and write the JSON; exit with an error when an invariant text differs."""
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    flips = measure_flips(make_questions(args.questions), args.tokens, args.dtype)
    price = measure_price(args.batches, args.rounds, args.tokens, args.dtype)
    found = {"dtype": args.dtype, "model": "outrider-demo", "flips": flips, "price": price}
    write_result(args.output_json, CLAIM, "own products", found)
    if any(row["batch_invariant"] and row["texts_that_differ"] for row in flips):
        raise SystemExit("batch_invariant=True did not keep the texts equal")


if __name__ == "__main__":
    main()
