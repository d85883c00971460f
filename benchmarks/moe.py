"""Decoding speed of a mixture of experts, compared with the time that the memory needs for a token's active weights.

    python benchmarks/moe.py [--tokens 24] [--rounds 15] [--output-json F]

The model has the shape of Qwen3-MoE with 0.5 billion active parameters and random weights. One request is decoded, and
products of plain linear layers with as many bytes, on the same pages and by the same threads, take their turn with it
about every second, as often as tokens are decoded. The figure is the median of the pairs' ratios.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from lora_models import make_tokenizer
from model_code import make_decode
from script import in_turn, make_parser, ratio_of, write_result

from outrider import LLM
from outrider.kernels.linear import pack
from outrider.platform.cli.bench.machine import RANDOM_WEIGHTS

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 24, 1024, 512, 16, 8, 64
EXPERTS, TOP_K, VOCAB = 32, 8, 151936
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INNER,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    RANDOM_WEIGHTS: True,
}
LINEAR = (4096, 1024)
"""(out, in) of the plain layers."""


def active_weights() -> int:
    """Weights that one token multiplies."""
    attention = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS)
    return LAYERS * (attention + HIDDEN * EXPERTS + 3 * TOP_K * HIDDEN * INNER) + VOCAB * HIDDEN


def make_stream(weights: int, tokens: int) -> Callable[[], float]:
    """Return a function that computes products of one row with `weights` numbers, once for each of `tokens`, and gives
    the seconds of one time."""
    out, inner = LINEAR
    linears = [pack(torch.randn(out, inner).bfloat16()) for _ in range(round(weights / (out * inner)))]
    x = torch.randn(1, inner).bfloat16()

    @torch.inference_mode()
    def seconds() -> float:
        began = time.perf_counter()
        for _ in range(tokens):
            for linear in linears:
                linear(x)
        return (time.perf_counter() - began) / tokens * weights / (len(linears) * out * inner)

    return seconds


def main() -> None:
    """Measure, print and write."""
    parser = make_parser(__doc__, rounds=15)
    parser.add_argument("--tokens", type=int, default=24, help="decoded in each round")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        make_tokenizer().save_pretrained(folder)
        with LLM(folder, load_format="dummy", max_model_len=512, max_num_seqs=4) as llm:
            speed, stream = make_decode(llm, 1, args.tokens), make_stream(active_weights(), args.tokens)
            found = in_turn({"decode": lambda: 1 / speed(), "stream": stream}, args.rounds)
    medians = {name: statistics.median(values) for name, values in found.items()}
    share = ratio_of(found["stream"], found["decode"])
    gigabytes = 2 * active_weights() / 1e9
    print(
        f"{active_weights() / 1e9:.2f}B active: {medians['decode'] * 1e3:.1f} ms a token, the same bytes "
        f"{medians['stream'] * 1e3:.1f} ms ({gigabytes / medians['stream']:.0f} GB/s): {share['ratio']} of the "
        f"possible speed, {min(share['ratios'])} to {max(share['ratios'])}"
    )
    values = {
        "settings": {"tokens": args.tokens, "rounds": args.rounds, "threads": torch.get_num_threads(), **CONFIG},
        "active_weights": active_weights(),
        "tokens_per_second": round(1 / medians["decode"], 2),
        "share": share,
        "rounds": {name: [round(value, 5) for value in values] for name, values in found.items()},
    }
    claim = "Decoding of a mixture of experts over the speed that its active bytes allow"
    write_result(args.output_json, claim, "0.5B active", values)


if __name__ == "__main__":
    main()
