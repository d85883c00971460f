"""Train a LoRA adapter with TRL's AsyncGRPO, whose rollouts come from a running server.

    python train.py --model FOLDER --server http://127.0.0.1:8000 --steps 50 --output-dir DIR

Each step prints one line of JSON: TRL's metrics, and the adapters that the server has. The reward is a toy:
commas for each word of an answer.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import requests
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback

if not torch.cuda.is_available():
    import on_cpu  # before TRL

from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

THINGS = "apple river clock train garden winter letter island candle forest mirror bridge market planet violin kitchen"
PROMPTS = [[{"role": "user", "content": f"Tell me about a {thing}."}] for thing in THINGS.split()]

ANSWERS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}},
}
"""How transformers reads an answer of a ChatML model; TRL knows it itself for the models that it lists."""


def commas(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """Commas for each word of the answers."""
    texts = ["".join(message["content"] for message in completion) for completion in completions]
    return [text.count(",") / max(len(text.split()), 1) for text in texts]


class Report(TrainerCallback):
    """Prints each step's metrics."""

    def __init__(self, server: str) -> None:
        self.server = server

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """Print a line of JSON."""
        models = requests.get(f"{self.server}/v1/models", timeout=60).json()["data"]
        adapters = [model["id"] for model in models if model["id"].startswith("trl-policy-")]
        print(json.dumps({"step": state.global_step, "time": time.time(), "adapters": adapters, **logs}), flush=True)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the server's base model, a folder")
    parser.add_argument("--server", required=True, help="address of the server")
    parser.add_argument("--output-dir", required=True, help="folder of adapters, which the server can read")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=20, help="of an answer")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.response_template = ANSWERS
    trainer = AsyncGRPOTrainer(
        model=options.model,
        processing_class=tokenizer,
        reward_funcs=commas,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        args=AsyncGRPOConfig(
            output_dir=options.output_dir,
            vllm_server_base_url=options.server,
            max_steps=options.steps,
            max_completion_length=options.max_tokens,
            num_generations=8,
            per_device_train_batch_size=16,
            token_budget=0,  # 16 answers a step, however long they are
            max_staleness=2,
            max_inflight_tasks=16,  # on one machine: the server should not be far ahead
            queue_maxsize=16,
            learning_rate=2e-3,
            bf16=torch.cuda.is_available(),
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        callbacks=[Report(options.server)],
    )
    if not torch.cuda.is_available():
        on_cpu.register_attention()
    trainer.train()


if __name__ == "__main__":
    main()
