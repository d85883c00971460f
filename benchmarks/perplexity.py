"""Perplexity of two fixed texts with weights quantised while they are loaded, and with a KV cache of fp8.

    python benchmarks/perplexity.py [--model PATH] [--output FILE.json] [--quantization int8 int4 fp8] [--window 1024]

"decisions" is docs/decisions, technical prose with tables and code; "news" is texts/news.txt, plain prose written for
this. They are cut into windows; each window's first token has no probability. `ratio` is the perplexity over that of
the weights as they are stored, with a cache of the model's dtype.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from script import logprobs_of, make_parser, settings_of, write_result

from outrider import LLM
from outrider.models.demo import demo_model_path

HERE = Path(__file__).parent
TEXTS = {"decisions": sorted((HERE.parent / "docs" / "decisions").glob("*.md")), "news": [HERE / "texts" / "news.txt"]}


def perplexities(model: str, dtype: str, window: int, **options: Any) -> dict[str, float]:
    """Perplexity of each text's tokens, each token given those before it in its window."""
    found = {}
    with LLM(model, dtype=dtype, max_model_len=window + 1, max_num_seqs=4, **options) as llm:
        for name, files in TEXTS.items():
            ids = llm.get_tokenizer().encode("\n".join(file.read_text() for file in files))
            windows = [ids[start : start + window] for start in range(0, len(ids), window)]
            found[name] = math.exp(-statistics.mean(logprobs_of(llm, [part for part in windows if len(part) > 1])))
    return found


def main() -> None:
    """Measure, print, and write the results."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default=str(demo_model_path()))
    parser.add_argument("--quantization", nargs="*", default=["int8", "int4", "fp8"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--window", type=int, default=1024)
    args = parser.parse_args()
    stored = perplexities(args.model, args.dtype, args.window)
    print("stored", {name: round(value, 4) for name, value in stored.items()}, flush=True)
    kinds = {method: {"quantization": method} for method in args.quantization}
    ratios = {}
    for kind, options in (kinds | {"fp8 KV cache": {"kv_cache_dtype": "fp8"}}).items():
        found = perplexities(args.model, args.dtype, args.window, **options)
        ratios[kind] = {name: round(value / stored[name], 5) for name, value in found.items()}
        print(kind, ratios[kind], flush=True)
    settings = settings_of(args)
    result = {"settings": settings, "perplexity": stored, "ratio": ratios}
    write_result(args.output_json, "Perplexity with quantised weights and caches", settings["model"], result)


if __name__ == "__main__":
    main()
