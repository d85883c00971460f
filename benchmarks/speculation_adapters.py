"""Three adapters of a chat model for narrow tasks, trained with PEFT for a few minutes each: SQL for a sentence, a JSON
object of its facts, and the tone of a support agent. Their texts are the demo model's.

    python benchmarks/speculation_adapters.py MODEL OUT_DIR [--tasks json,sql,support] [--steps 40]

    OUT_DIR/{json,sql,support}    PEFT adapters
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from random import Random
from typing import Any

from checkout import use_checkout

use_checkout()

import torch  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from speculation_prompts import TASKS  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.utils.rnn import pad_sequence  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from outrider.spec_decode.training.products import product_dtype  # noqa: E402
from outrider.tools.demo_model.mixture import ADAPTERS  # noqa: E402
from outrider.tools.demo_model.templates import Document  # noqa: E402
from outrider.tools.demo_model.training import PROJECTIONS  # noqa: E402

RANK, ALPHA, RATE = 8, 16, 1e-3
CHATS, WARMUP = 8, 5
"""Chats of a step, and steps over which the rate rises; then it falls linearly to zero."""
IGNORED = -100
"""Label of tokens that do not count: prompts and padding."""


def encode(tokenizer: Any, document: Document) -> tuple[Tensor, Tensor]:
    """Tokens of a chat, and the labels of those of its last answer; both [T]."""
    turns = [{"role": role, "content": content} for role, content in document.messages]
    prompt = tokenizer.apply_chat_template(turns[:-1], tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    answer = [*tokenizer.encode(turns[-1]["content"], add_special_tokens=False), tokenizer.eos_token_id]
    return torch.tensor(ids + answer), torch.tensor([IGNORED] * len(ids) + answer)


def mean_loss(model: Any, chats: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Mean cross entropy of the labelled tokens; logits are computed for these alone."""
    ids, labels = (pad_sequence(part, True, IGNORED) for part in zip(*chats, strict=True))
    decoder = model.get_base_model()
    hidden = decoder.model(input_ids=ids.clamp(min=0)[:, :-1], use_cache=False).last_hidden_state
    counts = labels[:, 1:] != IGNORED
    return F.cross_entropy(decoder.lm_head(hidden[counts]).float(), labels[:, 1:][counts])


def train_adapter(model: str, task: str, steps: int, folder: Path) -> None:
    """Train the adapter of a task and write it."""
    torch.manual_seed(0)
    products = product_dtype(torch.bfloat16, torch.device("cpu"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=products), config)
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), weight_decay=0.0)
    rng = Random(0)
    for step in range(steps):
        chats = [encode(tokenizer, ADAPTERS[task](rng)) for _ in range(CHATS)]
        with torch.autocast("cpu", torch.bfloat16, enabled=products == torch.bfloat16):
            loss = mean_loss(adapted, chats)
        loss.backward()
        optimizer.param_groups[0]["lr"] = RATE * min((step + 1) / WARMUP, (steps - step) / (steps - WARMUP))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 5 == 4:
            logging.info("%s, step %d of %d: loss %.3f", task, step + 1, steps, loss.item())
    config.base_model_name_or_path = Path(model).name
    config.target_modules = list(PROJECTIONS)
    adapted.save_pretrained(folder / task, save_embedding_layers=False)
    (folder / task / "README.md").unlink(missing_ok=True)


def main() -> None:
    """Train the adapters that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("folder", type=Path, metavar="OUT_DIR")
    parser.add_argument("--tasks", default=",".join(TASKS), help="(default: all)")
    parser.add_argument("--steps", type=int, default=40, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(default: %(default)s)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(options.threads)
    for task in options.tasks.split(","):
        train_adapter(options.model, task, options.steps, options.folder)
        logging.info("the adapter %s is trained", task)


if __name__ == "__main__":
    main()
