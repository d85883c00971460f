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
    "dtype": "float32", "enable_lora": True, "max_loras": 2, "max_model_len": 256, "device": "cpu",
    "speculative_config": {"method": "eagle3", "model": HEAD, "num_speculative_tokens": 3},
}  # fmt: skip


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


def preempted_texts(llm: LLM) -> tuple[list[str], list[str]]:
    """Long texts of requests that preempt each other in a cache of 17 blocks, and the same one after another."""
    long = SamplingParams(max_tokens=140, temperature=0, ignore_eos=True)
    before = llm.llm_engine.stats().num_preemptions
    together = [output.outputs[0].text for output in llm.generate(PROMPTS, long)]
    assert llm.llm_engine.stats().num_preemptions > before, "17 blocks have room for 272 tokens"
    return together, [llm.generate([prompt], long)[0].outputs[0].text for prompt in PROMPTS]


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
