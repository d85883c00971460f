"""EAGLE-3 in llama.cpp: its speed-up with a head of `outrider train-draft`, to compare with Outrider's on the same
prompts (`benchmarks/speculation_table.py --parts chat`).

    python convert_hf_to_gguf.py MODEL --outtype bf16 --outfile target.gguf                (llama.cpp's)
    python convert_hf_to_gguf.py HEAD --target-model-dir MODEL --outtype bf16 --outfile head.gguf
    python benchmarks/llama_cpp_eagle3.py --model MODEL --bin BUILD/bin --target target.gguf --head head.gguf \\
        --prompts held-out-chat.jsonl --output-json F

One request at a time, greedy, on all cores of this process; only decoding counts. In each round every prompt is
answered without drafts by llama-completion, then with each number of drafts by llama-speculative-simple.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from pathlib import Path
from statistics import median

from checkout import use_checkout

use_checkout()

from outrider.models.checkpoint.tokenizer import load_tokenizer  # noqa: E402
from outrider.platform.cli.bench.bench_options import write_json  # noqa: E402
from outrider.platform.cli.bench.machine import describe_machine  # noqa: E402
from outrider.platform.cli.bench.prompt_files import encode, read_prompts  # noqa: E402

OFF = re.compile(r"[^t] eval time = +([\d.]+) ms / +(\d+) runs")
DRAFTED = re.compile(r"decoded +(\d+) tokens in +([\d.]+) seconds")
ACCEPTED = re.compile(r"n_accept += (\d+)")


def answer(options: argparse.Namespace, prompt: str, drafts: int) -> tuple[int, float, int]:
    """Tokens of an answer, seconds of decoding, and accepted drafts.

    Raises:
        RuntimeError: llama.cpp failed, or prints something else.
    """
    common = ["-m", options.target, "-p", prompt, "-n", str(options.max_tokens), "-c", "1024", "--temp", "0"]
    common += ["-t", str(len(os.sched_getaffinity(0))), "--seed", "0"]
    program, more = "llama-completion", ["-no-cnv", "--no-display-prompt"]
    if drafts:
        program = "llama-speculative-simple"
        more = ["-md", options.head, "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(drafts)]
    command = [options.bin / program, *common, *more]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace", check=False)
    printed = done.stdout + done.stderr
    found = (DRAFTED if drafts else OFF).search(printed)
    if found is None or done.returncode:
        raise RuntimeError(f"{program} ended with {done.returncode}: {printed[-2000:]}")
    if not drafts:
        return int(found[2]), float(found[1]) / 1000, 0
    accepted = ACCEPTED.search(printed)
    return int(found[1]), float(found[2]), int(accepted[1]) if accepted else 0


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("bin", "target", "head", "model", "prompts"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--drafts", default="2,4", help="(default: %(default)s)")
    parser.add_argument("--num-prompts", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--output-json", type=Path, metavar="FILE")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.model)
    read = read_prompts(options.prompts, "--prompts")[: options.num_prompts]
    prompts = [tokenizer.decode(encode(tokenizer, prompt.content, "--prompts")) for prompt in read]
    counts = [0, *map(int, options.drafts.split(","))]
    rounds = []
    for _ in range(options.rounds):
        sums = {drafts: [0.0, 0.0, 0.0] for drafts in counts}
        for prompt in prompts:
            for drafts in counts:
                found = answer(options, prompt, drafts)
                sums[drafts] = [a + b for a, b in zip(sums[drafts], found, strict=True)]
        rounds.append(sums)
    rows = []
    for drafts in counts:
        speeds = [sums[drafts][0] / sums[drafts][1] for sums in rounds]
        tokens, _, accepted = (sum(column) for column in zip(*(sums[drafts] for sums in rounds), strict=True))
        ratios = [speed / (sums[0][0] / sums[0][1]) for speed, sums in zip(speeds, rounds, strict=True)]
        rows.append(
            {
                "drafts": drafts,
                "tokens_per_second": median(speeds),
                "speedup": median(ratios),
                "speedups": ratios,
                "acceptance_length": tokens / (tokens - accepted),
            }
        )
        print({name: round(value, 3) for name, value in rows[-1].items() if name != "speedups"}, flush=True)
    if options.output_json:
        settings = {name: getattr(options, name) for name in ("num_prompts", "max_tokens", "rounds")}
        write_json({"machine": describe_machine(), "settings": settings, "rows": rows}, options.output_json)


if __name__ == "__main__":
    main()
