"""Speed of a model through transformers' code over that of native code, of decoding and of prompts.

    python benchmarks/model_code.py --model MODEL [--batch-sizes 1,8] [--rounds 7] [--output-json F]

Both engines are in one process, and take turns. Prompts have 512 tokens; 8 of them are computed at once.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from script import in_turn, make_parser, ratio_of, settings_of, write_result

from outrider import LLM, SamplingParams

PROMPT, TOKENS = 512, 48
IMPLS = ("native", "transformers")


def make_decode(llm: LLM, batch_size: int, tokens: int = TOKENS) -> Callable[[], float]:
    """Return a function that gives the tokens per second of `batch_size` requests, without their prompts."""
    prompts = [{"prompt_token_ids": list(range(9 + row, 41 + row))} for row in range(batch_size)]
    params = SamplingParams(temperature=0, max_tokens=tokens + 1, ignore_eos=True)

    def speed() -> float:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        ends = [output.metrics.finished_time for output in outputs]
        starts = [output.metrics.first_token_time for output in outputs]
        return batch_size * tokens / (max(ends) - max(starts))

    return speed


def make_prompts(llm: LLM) -> Callable[[], float]:
    """Return a function that gives the prompt tokens per second of 8 prompts that no cache knows."""
    numbers = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def speed() -> float:
        prompts = [{"prompt_token_ids": [numbers.randrange(100, 20_000) for _ in range(PROMPT)]} for _ in range(8)]
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return 8 * PROMPT / (time.perf_counter() - began)

    return speed


def main() -> None:
    """Measure, print and write."""
    parser = make_parser(__doc__, rounds=7, model=True)
    parser.add_argument("--batch-sizes", default="1,8", help="numbers of requests that are decoded at once")
    args = parser.parse_args()
    common = {"max_model_len": 1024, "max_num_seqs": 8, "kv_cache_memory_bytes": 512 << 20}
    engines = {impl: LLM(args.model, model_impl=impl, **common) for impl in IMPLS}
    cases = [
        (f"decode, {size}", lambda llm, size=int(size): make_decode(llm, size)) for size in args.batch_sizes.split(",")
    ]
    rows = []
    for name, make in [*cases, ("prompts", make_prompts)]:
        found = in_turn({impl: make(llm) for impl, llm in engines.items()}, args.rounds)
        speeds = {impl: round(statistics.median(values), 1) for impl, values in found.items()}
        rows.append({"case": name, **speeds, **ratio_of(found["transformers"], found["native"])})
        print(f"{name}: {speeds['transformers']} of {speeds['native']} tokens/s, ratio {rows[-1]['ratio']}")
    for llm in engines.values():
        llm.shutdown()
    claim = "Speed through transformers' code over that of native code"
    write_result(args.output_json, claim, "transformers' code", {"settings": settings_of(args), "rows": rows})


if __name__ == "__main__":
    main()
