"""Perplexity of a fixed text with weights as they are stored and quantised while they are loaded.

    python benchmarks/perplexity.py [--model PATH] [--output FILE.json] [--quantization int8 int4 fp8] [--window 1024]

The text is that of docs/decisions, cut into windows; each window's first token has no probability. `ratio` is the
perplexity over that of the stored weights.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from script import logprobs_of, make_parser, settings_of, write_result

from outrider import LLM
from outrider.models.demo import demo_model_path

TEXT = Path(__file__).parent.parent / "docs" / "decisions"


def perplexity(model: str, quantization: str | None, dtype: str, window: int) -> float:
    """Perplexity of the text's tokens, each given those before it in its window."""
    text = "\n".join(file.read_text() for file in sorted(TEXT.glob("*.md")))
    with LLM(model, quantization=quantization, dtype=dtype, max_model_len=window + 1, max_num_seqs=4) as llm:
        ids = llm.get_tokenizer().encode(text)
        windows = [ids[start : start + window] for start in range(0, len(ids), window)]
        return math.exp(-statistics.mean(logprobs_of(llm, [part for part in windows if len(part) > 1])))


def main() -> None:
    """Measure, print, and write the results."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default=str(demo_model_path()))
    parser.add_argument("--quantization", nargs="+", default=["int8", "int4", "fp8"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--window", type=int, default=1024)
    args = parser.parse_args()
    stored = perplexity(args.model, None, args.dtype, args.window)
    print("stored", round(stored, 4), flush=True)
    quantised = {}
    for method in args.quantization:
        found = perplexity(args.model, method, args.dtype, args.window)
        quantised[method] = {"perplexity": round(found, 4), "ratio": round(found / stored, 5)}
        print(method, quantised[method], flush=True)
    settings = settings_of(args)
    result = {"settings": settings, "perplexity": round(stored, 4), "quantised": quantised}
    write_result(args.output_json, "Perplexity with quantised weights", settings["model"], result)


if __name__ == "__main__":
    main()
