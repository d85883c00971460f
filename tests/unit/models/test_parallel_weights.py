"""Quantised weights and experts that several ranks share: their logits are those of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from outrider.kernels.quantized_linear import QuantizedWeight
from outrider.lora.device.dora import head_weight, slice_weight, table_weight
from outrider.models.checkpoint.loader import ModelOptions, load_model, read_facts
from outrider.models.model import LanguageModel
from outrider.models.parallel import Ranks
from outrider.models.quantization.rounding import ROUNDINGS, round_int4
from outrider.platform.core.errors import InvalidRequestError

from ...gguf_files import write_gguf
from ...quantized_files import CASES, write_quantized
from ...thread_ranks import logits, on_ranks
from ...tiny_families import FAMILIES, SIZES, VARIANTS

# Rounding of W8A8's inputs, which each rank does with the largest input of its own part.
ROUNDED = 0.1


def check(path: Path, size: int = 2, quantization: str | None = None, tolerance: float = 1e-5) -> None:
    """Compare the logits of ranks with those of one process, relative to the largest."""
    whole = logits(load_model(path, "float32", options=ModelOptions("native", quantization)))
    atol = tolerance * float(whole.abs().max())
    for found in on_ranks(
        size, lambda ranks: logits(load_model(path, "float32", options=ModelOptions("native", quantization, ranks)))
    ):
        torch.testing.assert_close(found, whole, rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_every_format_is_divided(kind: str, save_tiny: Callable, tmp_path: Path) -> None:
    write_quantized(save_tiny("Llama", **CASES[kind].sizes)[0], tmp_path, CASES[kind])
    check(tmp_path, tolerance=ROUNDED if CASES[kind].rounds_inputs else 1e-5)


SPARSE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
EXPERTS = {
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 50},
    "Qwen3Moe": {**SPARSE, "mlp_only_layers": [0]},
    "Qwen2Moe": {**SPARSE, "shared_expert_intermediate_size": 32},
}


@pytest.mark.parametrize("family", ["deepseek2", "deepseek3", "gpt-oss"])
def test_heads_of_other_attention_are_divided(family: str, save_tiny: Callable, tmp_path: Path) -> None:
    """Latents, with queries of the hidden state and of a vector of their own, and sinks."""
    folder, reference = save_tiny(FAMILIES[family].prefix, **FAMILIES[family].config)
    check(folder, 4)
    reference.save_pretrained(tmp_path, save_original_format=False)
    check(tmp_path, 2, "int8")


GPT = ["gpt2", "bigcode", "opt", "opt-projected", "neox", "falcon", "phi", "stablelm", "starcoder2"]


NEWER = [*("llama4", "glm4-moe", "glm4-moe-lite", "minimax-m2", "cohere2", "ministral3", "ernie4.5-moe", "deepseek3.2")]


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", NEWER)
def test_newer_families_are_divided(name: str, quantization: str | None, tmp_path: Path) -> None:
    family = FAMILIES[name]
    raw = {"architectures": [f"{family.prefix.removesuffix('Text')}ForCausalLM"], **SIZES, **family.config}
    (tmp_path / "config.json").write_text(json.dumps(raw))

    def load(ranks: Ranks | None) -> LanguageModel:
        options = ModelOptions("native", quantization, ranks)
        return load_model(tmp_path, "float32", load_format="dummy", seed=3, options=options)

    whole = logits(load(None))
    for found in on_ranks(2, lambda ranks: logits(load(ranks))):
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-5 * float(whole.abs().max()))


STATES = [
    *("lfm2", "lfm2-moe", "qwen3.5", "qwen3-next", "qwen3.5-moe", "olmo-hybrid", "kimi-linear", "mamba2", "bamba"),
    *("falcon-h1", "falcon-h1-norm", "granite4", "nemotron-h"),
]
GROUPS = {
    **{"mamba2": {"n_groups": 2}, "nemotron-h": {"n_groups": 2}},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 12},
    "falcon-h1-norm": {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 1},
}
"""Groups of Mamba-2 that ranks divide, or share."""


@pytest.mark.parametrize("name", STATES)
def test_recurrent_layers_are_divided(name: str, save_tiny: Callable) -> None:
    """Heads, or channels, and their states; if four ranks share two groups, or one, they normalise together."""
    family = {**FAMILIES, **VARIANTS}[name]
    folder, _ = save_tiny(family.prefix, **{**family.config, **GROUPS.get(name, {})})
    check(folder)
    check(folder, 4 if name in ("bamba", "falcon-h1-norm", "lfm2", "kimi-linear") else 2, "int8")


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", ["gemma3n", "gemma4", "gemma4-experts"])
def test_layers_of_several_shapes_are_divided(name: str, quantization: str | None, save_tiny: Callable) -> None:
    """Cut gates have the mean and the deviation of all ranks' elements."""
    folder, _ = save_tiny(FAMILIES[name].prefix, **FAMILIES[name].config)
    check(folder, 2, quantization)
    check(folder, 4, quantization)


@pytest.mark.parametrize(
    ("name", "size", "word"),
    [
        ("qwen3.5", 4, "linear_num_key_heads 2"),
        ("mamba2", 2, "groups of Mamba-2 3"),
        ("bamba", 4, "heads of Mamba-2 6"),
    ],
)
def test_recurrent_layers_that_cannot_be_divided_are_named(
    name: str, size: int, word: str, save_tiny: Callable
) -> None:
    folder, _ = save_tiny(FAMILIES[name].prefix, **FAMILIES[name].config)
    with pytest.raises(InvalidRequestError, match=word) as caught:
        read_facts(folder, num_ranks=size)
    assert caught.value.param == "tensor_parallel_size"


@pytest.mark.slow
@pytest.mark.parametrize("family", [*GPT, "olmo2", "olmoe"])
def test_layers_of_other_forms_are_divided(family: str, save_tiny: Callable) -> None:
    """Layers of the GPT form, and norms over all heads; two of four ranks have the same KV head if there are two."""
    folder, _ = save_tiny(FAMILIES[family].prefix, **FAMILIES[family].config)
    check(folder, 2)
    check(folder, 4)


def test_all_heads_with_one_key(save_tiny: Callable) -> None:
    check(save_tiny("GPTBigCode", multi_query=True)[0], 4)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_divided(family: str, size: int, save_tiny: Callable, tmp_path: Path) -> None:
    folder, reference = save_tiny(family, **EXPERTS[family])
    check(folder, size)
    reference.save_pretrained(tmp_path, save_original_format=False)  # one tensor holds all experts
    check(tmp_path, size, "int8")


def test_experts_of_a_quantised_checkpoint(save_tiny: Callable, tmp_path: Path) -> None:
    sizes = {**SPARSE, "shared_expert_intermediate_size": 64, "hidden_size": 64}
    write_quantized(save_tiny("Qwen2Moe", **sizes)[0], tmp_path, CASES["awq"])
    check(tmp_path)


def test_a_rank_holds_its_own_experts_alone(save_tiny: Callable) -> None:
    folder, _ = save_tiny("Mixtral", **EXPERTS["Mixtral"])

    def held(ranks: Ranks) -> list[int]:
        model = load_model(folder, "float32", options=ModelOptions("native", ranks=ranks))
        linears = [linear for linear in model.linears() if ".0.experts." in linear.name and not linear.is_elsewhere]
        return [int(linear.name.split(".")[3]) for linear in linears if linear.name.endswith("down")]

    assert on_ranks(2, held) == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize("quantization", ROUNDINGS)
def test_weights_that_are_rounded_while_they_are_loaded(quantization: str, save_tiny: Callable) -> None:
    check(save_tiny("Phi3", hidden_size=64, intermediate_size=128, pad_token_id=0)[0], quantization=quantization)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_1])
def test_a_gguf_file_is_divided(kind: Type, save_tiny: Callable, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "tie_word_embeddings": True}
    write_gguf(save_tiny("Llama", **sizes)[0], tmp_path / "m.gguf", lambda name: kind)
    check(tmp_path / "m.gguf")


def whole_weights(model: LanguageModel) -> dict[str, tuple[Tensor, Tensor]]:
    """Squared norms of the rows of each weight and its product with ones, as adapters with magnitudes see them."""
    embedding = model.embedding
    bases = {"table": (table_weight(embedding), embedding.vocab_size)}
    bases["head"] = head_weight(embedding), embedding.hidden_size
    for linear in model.linears():
        if linear.expert:
            continue
        layer = linear if linear.part is None else linear.part
        name, rows = layer.slices[0]
        bases[name] = slice_weight(linear, 0, rows, name), layer.in_features
    return {name: base.measure(torch.ones(1, size)) for name, (base, size) in bases.items()}


@pytest.mark.parametrize("kind", ["transposed", "int8", "latents", "states", "awq", "gguf"])
def test_adapters_see_whole_weights(kind: str, save_tiny: Callable, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
    folder, _ = save_tiny("GPT2" if kind == "transposed" else "Llama", **sizes)
    options = ModelOptions("native", "int8" if kind in ("int8", "latents") else None)
    if kind == "latents":  # `kv_b_proj` is not rounded
        folder, _ = save_tiny(FAMILIES["deepseek2"].prefix, **FAMILIES["deepseek2"].config)
    elif kind == "states":  # a projection has the rows of several heads of a rank in three places
        folder, _ = save_tiny(FAMILIES["qwen3.5"].prefix, **FAMILIES["qwen3.5"].config)
    elif kind == "awq":
        write_quantized(save_tiny("Llama", **CASES[kind].sizes)[0], tmp_path, CASES[kind])
        folder = tmp_path
    elif kind == "gguf":
        write_gguf(folder, tmp_path / "m.gguf", lambda name: Type.Q8_0)
        folder = tmp_path / "m.gguf"
    whole = whole_weights(load_model(folder, "float32", options=options))
    for found in on_ranks(
        2, lambda ranks: whole_weights(load_model(folder, "float32", options=options._replace(ranks=ranks)))
    ):
        for name, pair in found.items():
            torch.testing.assert_close(pair, whole[name], rtol=1e-4, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(("inputs", "cuts"), [(128, (0, 64, 128)), (96, (0, 48, 96)), (100, (0, 32, 100))])
def test_columns_of_a_weight(inputs: int, cuts: tuple[int, ...]) -> None:
    weight = round_int4(torch.randn(5, inputs), group=32)
    parts = [weight.columns(start, stop) for start, stop in pairwise(cuts)]
    assert torch.cat([part.dequantized() for part in parts], 1).equal(weight.dequantized())


def test_a_cut_into_too_small_groups_is_named() -> None:
    weight = QuantizedWeight(bits=8, codes=torch.zeros(2, 72, dtype=torch.int8), scales=torch.ones(2, 3), group=24)
    with pytest.raises(ValueError, match="inputs 0 to 35 cut its groups of 24 into groups of 12"):
        weight.columns(0, 36)
