"""Effects of an fp8 KV cache: tokens that fit, text, and speed with long contexts.

    python benchmarks/fp8_cache.py [--output-json F] [--questions 40] [--tokens 96] [--model PATH] [--rounds 5]

- Text, on the demo model and its adapters. Greedy answers with a cache of the model's dtype are the reference. Their
  log-probabilities are computed again with the fp8 cache, the same tokens given: how far each is off, and what
  that does to the perplexity. And answers written with the fp8 cache: how many begin to differ, and how soon.
- Speed, on `--model` (default: the demo) with random tokens: decoding after prompts of several lengths, and prompts.
  Rounds of the two engines are interleaved in one process; the ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from near_ties import answer, compare, make_engine, make_questions
from script import in_turn, logprobs_of, make_parser, ratio_of, write_result

from outrider import LLM, LoRARequest, SamplingParams
from outrider.models.demo import demo_adapters

KINDS = ("auto", "fp8")
VOCAB = 1000
"""Size of the vocabulary of random prompts: every model has at least this many tokens."""


def measure_text(count: int, tokens: int, dtype: str) -> dict[str, Any]:
    """Compare texts and log-probabilities: the first part of the module's docstring."""
    questions = make_questions(count)
    params = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)] * count
    loras = [LoRARequest(name, path=str(demo_adapters()[name])) if name else None for name, _ in questions]
    texts, logprobs = {}, {}
    for kind in KINDS:
        with make_engine(False, {"kv_cache_dtype": kind}, dtype) as llm:
            texts[kind] = answer(llm, questions, params)
            logprobs[kind] = logprobs_of(llm, texts["auto"], loras)
    shifts = [fp8 - whole for whole, fp8 in zip(logprobs["auto"], logprobs["fp8"], strict=True)]
    return {
        **compare(texts["fp8"], texts["auto"]),
        "tokens": len(shifts),
        "mean_absolute_logprob_shift": round(statistics.mean(map(abs, shifts)), 5),
        "perplexity_ratio": round(math.exp(-statistics.mean(shifts)), 5),
    }


def measure_speed(model: str | None, lengths: list[int], batches: list[int], rounds: int) -> list[dict[str, Any]]:
    """Compare speeds: the second part of the module's docstring. The first round is a warm-up."""
    options = {"max_num_seqs": max(batches), "max_model_len": max(lengths) + 64, "enable_prefix_caching": True}
    engines = {kind: LLM(model, kv_cache_dtype=kind, **options) for kind in KINDS}
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in lengths:
        for batch in batches:
            prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for _ in range(batch)]
            works = {kind: partial(_decode_seconds, llm, prompts) for kind, llm in engines.items()}
            seconds = in_turn(works, rounds)
            row = {"context": length, "batch": batch, **ratio_of(seconds["auto"], seconds["fp8"])}
            rows.append(row)
            print(f"context {length:<6} batch {batch:<4} fp8 / whole decoding speed {row['ratio']}", flush=True)
    for llm in engines.values():
        llm.shutdown()
    return rows


def _decode_seconds(llm: LLM, prompts: list[list[int]]) -> float:
    """Seconds to decode 48 tokens a prompt, without the time to the first token. The prompts are cached."""
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    seconds = []
    for tokens in (1, 1, 49):  # the first call fills the prefix cache
        started = time.perf_counter()
        llm.generate(inputs, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
        seconds.append(time.perf_counter() - started)
    return seconds[2] - seconds[1]


def main() -> None:
    """Measure both parts, print them and write the JSON."""
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--model", help="for the speed (default: the demo model)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 900])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    text = measure_text(args.questions, args.tokens, args.dtype)
    print(json.dumps(text), flush=True)
    speed = measure_speed(args.model, args.lengths, args.batches, args.rounds)
    name = Path(args.model).name if args.model else "outrider-demo"
    found = {"dtype": args.dtype, "text": text, "speed_model": name, "speed": speed}
    write_result(args.output_json, "Text and speed with a KV cache of float8", name, found)


if __name__ == "__main__":
    main()
