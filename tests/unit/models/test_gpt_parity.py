"""Families of the GPT shape: forms that `tiny_families` lacks, checkpoints of old forms, batch invariance."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.models.checkpoint.loader import load_model
from outrider.models.config import config_from_hf
from outrider.models.layers.activation import plain_activation
from outrider.platform.core.errors import UnsupportedModelError

CONTEXT = 64
SIZES = {"num_key_value_heads": None, "max_position_embeddings": CONTEXT}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "gpt2": ("GPT2", {"n_inner": 72, "activation_function": "relu", "tie_word_embeddings": False}),
    "bigcode-one-kv-head": ("GPTBigCode", {}),
    "opt-no-biases": ("OPT", {"ffn_dim": 72, "enable_bias": False, "activation_function": "gelu"}),
    "opt-projected": ("OPT", {"ffn_dim": 80, "do_layer_norm_before": False, "word_embed_proj_dim": 24}),
    "neox-sequential": ("GPTNeoX", {"hidden_size": 64, "use_parallel_residual": False, "attention_bias": False}),
    "falcon-7b": ("Falcon", {"ffn_hidden_size": 80}),
    "falcon-heads": ("Falcon", {"ffn_hidden_size": 80, "multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon2": (
        "Falcon",
        {
            **{"ffn_hidden_size": 80, "new_decoder_architecture": True, "num_kv_heads": 2},
            **{"num_ln_in_parallel_attn": 1, "tie_word_embeddings": False},
        },
    ),
    "phi": ("Phi", {}),
    "stablelm-parallel": ("StableLm", {"num_key_value_heads": 4, "hidden_size": 64, "use_parallel_residual": True}),
    "starcoder2": ("Starcoder2", {"num_key_value_heads": 2, "use_bias": False, "tie_word_embeddings": False}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, save_tiny: Callable) -> tuple[Path, torch.nn.Module]:
    family, config = CASES[request.param]
    return save_tiny(family, **{**SIZES, **config})


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 131, (n,), generator=generator).tolist() for n in (CONTEXT, 9, 1, 33)]


def expected(reference: torch.nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return [reference(torch.tensor([tokens])).logits[0].float() for tokens in texts()]


@pytest.mark.slow
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_logits(case: tuple, driver: Callable, batch_invariant: bool) -> None:
    path, reference = case
    model = load_model(path, batch_invariant=batch_invariant)
    assert model.num_parameters == sum(parameter.numel() for parameter in reference.parameters())
    run, wanted = driver(model), expected(reference)
    chunks = driver(model)
    for row, logits in run.forward_once(dict(enumerate(texts()))).items():
        torch.testing.assert_close(logits, wanted[row], atol=1e-4, rtol=0)
        first, then = texts()[row][:20], texts()[row][20:]
        parts = [chunks.forward_once({row: part})[row] for part in (first, then) if part]
        torch.testing.assert_close(torch.cat(parts), wanted[row], atol=1e-4, rtol=0)
        assert not batch_invariant or torch.equal(torch.cat(parts), logits)


@pytest.mark.parametrize("family", ["GPT2", "OPT"])
def test_bfloat16_is_as_close_to_float32_as_transformers(family: str, save_tiny: Callable, driver: Callable) -> None:
    path, reference = save_tiny(family, dtype=torch.bfloat16, ffn_dim=80, **SIZES)
    exact = expected(type(reference).from_pretrained(path, dtype=torch.float32))[0]
    ours = driver(load_model(path)).forward_once({0: texts()[0]})[0]
    assert (ours - exact).abs().mean() < 1.5 * (expected(reference)[0] - exact).abs().mean()


@pytest.mark.parametrize(("family", "prefix"), [("GPT2", "transformer."), ("OPT", "model.")])
def test_checkpoints_of_the_inner_model(family: str, prefix: str, save_tiny: Callable, driver: Callable) -> None:
    """Names lack the prefix, and old files store buffers and the tied head."""
    path, reference = save_tiny(family, ffn_dim=80, **SIZES)
    file = path / "model.safetensors"
    tensors = {name.removeprefix(prefix): tensor for name, tensor in load_file(file).items()}
    table = next(tensor for name, tensor in tensors.items() if name.endswith(("wte.weight", "embed_tokens.weight")))
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "lm_head.weight": table.clone()}
    save_file(tensors, file, metadata={"format": "pt"})
    ours = driver(load_model(path)).forward_once({0: texts()[0]})[0]
    torch.testing.assert_close(ours, expected(reference)[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [
        ("GPT2LMHeadModel", "scale_attn_by_inverse_layer_idx", True),
        ("GPT2LMHeadModel", "scale_attn_weights", False),
        ("OPTForCausalLM", "word_embed_proj_dim", 0),
        ("OPTForCausalLM", "layer_norm_elementwise_affine", False),
        ("OPTForCausalLM", "activation_function", "silu"),
        ("GPT2LMHeadModel", "n_embd", "x"),
    ],
)
def test_unsupported_fields_are_refused_by_name(architecture: str, field: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=f"config.json: {field} ") as caught:
        config_from_hf({"architectures": [architecture], field: value}, torch.float32)
    assert caught.value.param == field


def test_junk_in_any_field_is_read_or_refused(case: tuple) -> None:
    raw = json.loads((case[0] / "config.json").read_text())
    for field in raw:
        for junk in ("x", [], {}, -1, 0, 1.5, float("nan"), 10**30, True, None, [[1]]):
            with contextlib.suppress(UnsupportedModelError):
                config_from_hf({**raw, field: junk}, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gelu", "gelu_new"])
def test_gelu(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(7, 83, generator=torch.Generator().manual_seed(4)).mul(4).to(dtype)
    x[0, :4] = torch.tensor([0.0, -30.0, 30.0, 1e-20])
    exact = torch.nn.functional.gelu(x.double(), approximate="tanh" if name == "gelu_new" else "none")
    ours = plain_activation(name, batch_invariant=True)(x)
    torch.testing.assert_close(ours.double(), exact, atol=2e-6, rtol=2e-6 if dtype == torch.float32 else 5e-3)
    assert torch.equal(plain_activation(name, batch_invariant=True)(x[2:3]), ours[2:3])
