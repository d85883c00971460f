"""Cost of long prompts for other requests, and savings of a shared prefix.

    python benchmarks/long_prompts.py --model PATH [--output-json F] [--prefix 1500] [--streams 8] [--tokens 256]

1. 32 requests share a prefix, one after the other: TTFT of the second to the last over the first one's.
2. `--streams` requests decode, first alone, then while prompts of the prefix's length, all different, arrive one after
   the other: p99 of the time between two outputs of a stream over their median, and over the median when alone.

Times are those of a client in this process; the engine has a process of its own. Tokens are random, so weights may be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import time
from typing import Any

import numpy as np
from script import make_parser, settings_of, write_result

from outrider import AsyncLLM, SamplingParams

CLAIM = "Latency of streams while long prompts arrive, and of prompts with a cached prefix"
REQUESTS = 32
OWN_TOKENS = 16
"""Number of a request's own tokens after the shared prefix."""


class Client:
    """Measurements with random prompts on one engine."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._random = random.Random(0)

    def prompt(self, length: int) -> list[int]:
        """Random token ids."""
        return [self._random.randrange(10, self._llm.info.vocab_size - 10) for _ in range(length)]

    async def times(self, prompt: list[int], max_tokens: int) -> list[float]:
        """Generate; returns the seconds from the start to each output."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        began = time.perf_counter()
        outputs = self._llm.generate({"prompt_token_ids": prompt}, params, delta=True)
        return [time.perf_counter() - began async for _ in outputs]


async def shared_prefix(client: Client, length: int) -> dict[str, Any]:
    """TTFT in seconds of the first request with a prefix, and of the following ones."""
    prefix = client.prompt(length)
    found = [(await client.times(prefix + client.prompt(OWN_TOKENS), 2))[0] for _ in range(REQUESTS)]
    later = np.array(found[1:])
    return {
        "first_ttft": found[0],
        "later_ttft_median": float(np.median(later)),
        "later_ttft_max": float(later.max()),
        "median_ratio": float(np.median(later)) / found[0],
        "max_ratio": float(later.max()) / found[0],
    }


async def _long_prompts(client: Client, length: int) -> list[float]:
    """Send long prompts, one after the other, until cancelled; returns their TTFT."""
    found: list[float] = []
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            times = await client.times(client.prompt(length), 1)
            found.append(times[0])
    return found


async def _streams(client: Client, count: int, tokens: int) -> list[float]:
    """Seconds between outputs of `count` requests that decode together."""
    runs = await asyncio.gather(*(client.times(client.prompt(OWN_TOKENS), tokens) for _ in range(count)))
    return [later - earlier for run in runs for earlier, later in itertools.pairwise(run[4:])]


async def interference(client: Client, length: int, streams: int, tokens: int) -> dict[str, Any]:
    """Time between outputs in seconds, alone and beside long prompts."""
    alone = np.array(await _streams(client, streams, tokens))
    sender = asyncio.create_task(_long_prompts(client, length))
    await asyncio.sleep(0)
    beside = np.array(await _streams(client, streams, tokens))
    sender.cancel()
    ttft = await sender
    median, p99 = float(np.median(beside)), float(np.quantile(beside, 0.99))
    return {
        "alone_median": float(np.median(alone)),
        "alone_p99": float(np.quantile(alone, 0.99)),
        "beside_median": median,
        "beside_p99": p99,
        "p99_over_median": p99 / median,
        "p99_over_alone_median": p99 / float(np.median(alone)),
        "long_prompts": len(ttft),
        "long_ttft_median": float(np.median(ttft)) if ttft else None,
    }


async def run(namespace: argparse.Namespace) -> dict[str, Any]:
    """Run both parts on one engine."""
    options: dict[str, Any] = {"dtype": namespace.dtype, "max_num_seqs": 64}
    async with AsyncLLM(namespace.model, **options) as llm:
        client = Client(llm)
        await client.times(client.prompt(64), 16)
        length = namespace.prefix
        await client.times(client.prompt(length), 2)
        return {
            "shared_prefix": await shared_prefix(client, length),
            "interference": await interference(client, length, namespace.streams, namespace.tokens),
        }


def main() -> None:
    """Measure, print and write."""
    parser = make_parser(__doc__, model=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prefix", type=int, default=1500, help="tokens of a long prompt")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    namespace = parser.parse_args()
    result = asyncio.run(run(namespace))
    for part, values in result.items():
        print(part)
        for name, value in values.items():
            print(f"  {name:22} {value:.4g}" if value is not None else f"  {name:22} -")
    settings = settings_of(namespace)
    write_result(namespace.output_json, CLAIM, settings["model"], {"settings": settings, **result})


if __name__ == "__main__":
    main()
