"""Perplexity of a fixed text with weights as they are stored and quantised while they are loaded.

    python benchmarks/perplexity.py [--model PATH] [--output FILE.json] [--quantization int8 int4 fp8] [--window 1024]

The text is that of docs/decisions, cut into windows; each window's first token has no probability. `ratio` is the
perplexity over that of the stored weights.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from outrider import LLM, SamplingParams
from outrider.models.demo import demo_model_path
from outrider.platform.cli.bench.machine import describe_machine

TEXT = Path(__file__).parent.parent / "docs" / "decisions"


def logprobs(model: str, quantization: str | None, dtype: str, window: int) -> list[float]:
    """Log-probabilities of the text's tokens, each given those before it in its window."""
    text = "\n".join(file.read_text() for file in sorted(TEXT.glob("*.md")))
    with LLM(model, quantization=quantization, dtype=dtype, max_model_len=window + 1, max_num_seqs=4) as llm:
        ids = llm.get_tokenizer().encode(text)
        prompts = [ids[start : start + window] for start in range(0, len(ids), window)]
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts if len(prompt) > 1],
            SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
            use_tqdm=False,
        )
    return [
        entry[token].logprob
        for output in outputs
        for token, entry in list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]
    ]


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(demo_model_path()))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--quantization", nargs="+", default=["int8", "int4", "fp8"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--window", type=int, default=1024)
    args = parser.parse_args()
    stored = logprobs(args.model, None, args.dtype, args.window)
    perplexity = math.exp(-statistics.mean(stored))
    result: dict[str, Any] = {
        "model": Path(args.model).name,
        "dtype": args.dtype,
        "tokens": len(stored),
        "perplexity": round(perplexity, 4),
        "machine": describe_machine(),
        "quantised": {},
    }
    for method in args.quantization:
        found = math.exp(-statistics.mean(logprobs(args.model, method, args.dtype, args.window)))
        result["quantised"][method] = {"perplexity": round(found, 4), "ratio": round(found / perplexity, 5)}
        print(method, result["quantised"][method], flush=True)
    text = json.dumps(result, indent=1) + "\n"
    print(text)
    if args.output is not None:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
