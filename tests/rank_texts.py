"""Prompts, options and texts by which engines of several ranks are compared with one of a single process.

As a program: an engine of two ranks on the cluster RAY_ADDRESS, which prints its texts and its ranks' addresses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider import LLM, LoRARequest, SamplingParams
from outrider.models.demo import demo_adapters
from outrider.platform.core.structured_outputs import StructuredOutputsParams

PROMPTS = ["The capital of France is", "Once upon a time", "SELECT name FROM"]
HEAD = str(Path(__file__).parents[1] / "models" / "demo" / "eagle3")
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "enable_lora": True, "max_loras": 2, "max_model_len": 96, "device": "cpu",
    "speculative_config": {"method": "eagle3", "model": HEAD, "num_speculative_tokens": 3},
}  # fmt: skip
NUM_BLOCKS = 7
"""KV blocks of 16 tokens, one more than the longest sequence takes."""


def texts(llm: LLM) -> list[str]:
    """Greedy and seeded texts of the base model and of all adapters, also by a grammar."""
    greedy = SamplingParams(max_tokens=12, temperature=0)
    found = llm.generate(PROMPTS, greedy)
    adapters = [LoRARequest(name, path=str(path)) for name, path in demo_adapters().items()]
    assert len(adapters) > OPTIONS["max_loras"], "one must leave its rows for another"
    found += llm.generate(PROMPTS * len(adapters), greedy, lora_request=[a for a in adapters for _ in PROMPTS])
    found += llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0.8, seed=5))
    schema = StructuredOutputsParams(regex="(yes|no), [0-9]{3}")
    found += llm.generate(PROMPTS[:1], SamplingParams(max_tokens=12, temperature=0, structured_outputs=schema))
    return [output.outputs[0].text for output in found]


def num_accepted(llm: LLM) -> int:
    """Drafts that were accepted so far."""
    return sum(entry.counts.num_accepted_tokens for entry in llm.llm_engine.stats().speculation)


def long_texts(llm: LLM) -> list[str]:
    """Texts of requests that preempt each other in a cache of NUM_BLOCKS."""
    long = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
    return [output.outputs[0].text for output in llm.generate(PROMPTS, long)]


def preempted_texts(llm: LLM) -> list[str]:
    """`long_texts` of an engine whose cache is that small."""
    before = llm.llm_engine.stats().num_preemptions
    found = long_texts(llm)
    assert llm.llm_engine.stats().num_preemptions > before, "the cache has room for 112 tokens"
    return found


def main() -> None:
    from ray import nodes
    from ray.util import placement_group_table

    with LLM(tensor_parallel_size=2, distributed_executor_backend="ray", **OPTIONS) as llm:
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes()}
        (group,) = placement_group_table().values()
        places = [addresses[group["bundles_to_node_id"][rank]] for rank in range(2)]
        print(json.dumps({"texts": texts(llm), "addresses": places}))


if __name__ == "__main__":
    main()
