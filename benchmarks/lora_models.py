"""Models with random weights for `outrider bench lora`: right for speed, meaningless for text.

    python benchmarks/lora_models.py OUT_DIR [--models small,medium]

    OUT_DIR/small     30M parameters, Llama shape
    OUT_DIR/medium    494M parameters, Qwen2 shape
    OUT_DIR/draft     3M parameters, Llama shape, for small

All in bfloat16, with a byte-level tokenizer of 4096 entries. Their config.json says `"random_weights": true`, so
results on them are labelled.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from outrider.platform.cli.bench.machine import RANDOM_WEIGHTS

TOKENS = 4096


def sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """Fields of a decoder's configuration."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


LLAMA = {"vocab_size": TOKENS, "max_position_embeddings": 2048}
QWEN = {"vocab_size": 151936, "max_position_embeddings": 4096}
SHAPES = {
    "small": (LlamaForCausalLM, LlamaConfig(**LLAMA, **sizes(512, 1536, 8, 8, 4))),
    "draft": (LlamaForCausalLM, LlamaConfig(**LLAMA, **sizes(256, 768, 2, 4, 4))),
    "medium": (Qwen2ForCausalLM, Qwen2Config(**QWEN, **sizes(896, 4864, 24, 14, 2))),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on Python's standard library, which every machine has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(sorted(map(str, Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def make_model(name: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write one of `SHAPES` to a folder; the weights are equal every time."""
    kind, config = SHAPES[name]
    torch.manual_seed(0)
    kind(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "config.json"
    written = json.loads(file.read_text(encoding="utf-8")) | {RANDOM_WEIGHTS: True}
    file.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Make the models that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="OUT_DIR")
    parser.add_argument("--models", default=",".join(SHAPES), help="(default: all)")
    options = parser.parse_args()
    names = options.models.split(",")
    for name in names:
        if name not in SHAPES:
            parser.error(f"unknown model {name!r}; known are {', '.join(SHAPES)}")
    tokenizer = make_tokenizer()
    for name in names:
        make_model(name, options.folder / name, tokenizer)
        print(options.folder / name)


if __name__ == "__main__":
    main()
