"""Logits and greedy text equal those of transformers, however the tokens are divided into rows and steps."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.models.checkpoint.loader import load_model

from ...tiny_families import FAMILIES, VARIANTS

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama-gqa-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-mha-biases": ("Llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-mqa-wide-heads": ("Llama", {"num_key_value_heads": 1, "head_dim": 20}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-dynamic-rope": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-one-head": ("Llama", {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 6}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "mistral-window-one": ("Mistral", {"sliding_window": 1, "num_key_value_heads": 4}),
    "mistral-no-window": ("Mistral", {"sliding_window": None, "head_dim": 14}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-mixed-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rms_norm_eps": 1e-5}),
    "qwen3-bias-mha": ("Qwen3", {"head_dim": 10, "num_key_value_heads": 4, "attention_bias": True}),
    "smollm3-listed-windows": (
        "SmolLM3",
        {"no_rope_layer_interval": 2, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "exaone4-no-window": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "seed-oss-usual-biases": ("SeedOss", {"head_dim": 16}),
    "glm-5": ("GlmMoeDsa", {**FAMILIES["deepseek3.2"].config, "index_topk_freq": 2}),
    **{name: (family.prefix, family.config) for name, family in {**FAMILIES, **VARIANTS}.items()},
}

TOLERANCES = {"qwen3.5": 1e-3, "qwen3.5-moe": 1e-3, "qwen3-next": 1e-3}
"""Largest differences of logits; 1e-4 elsewhere. Delta nets divide by norms of short vectors, and solve systems."""
LENGTHS = {0: 45, 1: 3, 2: 24, 3: 17, 4: 1, 5: 38}
Chunks = list[dict[int, list[int]]]


def schedules(prompts: dict[int, list[int]]) -> dict[str, Chunks]:
    """Ways to run the same prompts: each a list of steps, a step a dict of rows' next tokens."""
    ragged: Chunks = []
    done = dict.fromkeys(prompts, 0)
    sizes = [19, 1, 5, 2, 9, 1, 30, 40]  # long, decode-like, verification-like
    for step in range(40):
        chunk = {}
        for row, tokens in prompts.items():
            count = sizes[(step + row) % len(sizes)]
            if done[row] < len(tokens) and (step + row) % 4:
                chunk[row] = tokens[done[row] : done[row] + count]
                done[row] += len(chunk[row])
        ragged.append(chunk)
    assert all(done[row] == len(tokens) for row, tokens in prompts.items())
    return {
        "alone": [{row: tokens} for row, tokens in prompts.items()],
        "batched": [prompts],
        "ragged chunks": [chunk for chunk in ragged if chunk],
        "token by token, then the rest": [
            *({row: tokens[i : i + 1] for row, tokens in prompts.items() if i < len(tokens)} for i in range(12)),
            {row: tokens[12:] for row, tokens in prompts.items() if len(tokens) > 12},
        ],
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_text_match_transformers(case: str, save_tiny: Callable, driver: Callable) -> None:
    family, config = CASES[case]
    path, reference = save_tiny(family, **config)
    model = load_model(path)
    generator = torch.Generator().manual_seed(1)
    prompts = {row: torch.randint(0, 131, (n,), generator=generator).tolist() for row, n in LENGTHS.items()}
    with torch.no_grad():
        expected = {row: reference(torch.tensor([tokens])).logits[0] for row, tokens in prompts.items()}
    last: dict[int, Tensor] = {}
    for name, steps in schedules(prompts).items():
        if case in FAMILIES and name in ("alone", "batched"):
            continue  # whole prompts of each family are in tests/integration/test_families.py
        run = driver(model)
        parts: dict[int, list[Tensor]] = {row: [] for row in prompts}
        for chunk in steps:
            for row, logits in run.forward_once(chunk).items():
                parts[row].append(logits)
        for row, logits_of_row in parts.items():
            logits = torch.cat(logits_of_row)
            torch.testing.assert_close(
                logits, expected[row], atol=TOLERANCES.get(case, 1e-4), rtol=0, msg=f"{name}, row {row}"
            )
            last[row] = logits[-1]
    if case not in FAMILIES:  # their greedy text is in that file too
        _check_greedy(reference, prompts, run, last)


def _check_greedy(reference: torch.nn.Module, prompts: dict, run: Callable, last: dict[int, Tensor]) -> None:
    """Continue all rows greedily in one batch; transformers must choose the same token after each prefix."""
    texts = {row: [int(logits.argmax())] for row, logits in last.items()}
    for _ in range(9):
        for row, logits in run.forward_once({row: text[-1:] for row, text in texts.items()}).items():
            texts[row].append(int(logits[-1].argmax()))
    for row, text in texts.items():
        with torch.no_grad():
            logits = reference(torch.tensor([prompts[row] + text[:-1]])).logits[0]
        assert logits[len(prompts[row]) - 1 :].argmax(-1).tolist() == text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dtype"), [("llama-gqa-tied", torch.float16), *((case, torch.bfloat16) for case in ("qwen3", *FAMILIES))]
)
def test_half_precision_is_as_close_to_float32_as_transformers(
    case: str, dtype: torch.dtype, save_tiny: Callable, driver: Callable
) -> None:
    family, config = CASES[case]
    path, reference = save_tiny(family, dtype=dtype, **config)
    tokens = torch.randint(0, 131, (30,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        theirs = reference(tokens[None]).logits[0].float()
        exact = type(reference).from_pretrained(path, dtype=torch.float32)(tokens[None]).logits[0]
    model = load_model(path)
    ours = driver(model).forward_once({0: tokens.tolist()})[0]
    assert model.config.dtype == dtype
    # The median token: a router's near tie may give one token other experts, here or there.
    assert (ours - exact).abs().mean(-1).median() < 1.5 * (theirs - exact).abs().mean(-1).median()


def test_stored_dtype_can_be_overridden(save_tiny: Callable, driver: Callable) -> None:
    path, reference = save_tiny("Qwen2", dtype=torch.bfloat16)
    with torch.no_grad():
        exact = type(reference).from_pretrained(path, dtype=torch.float32)
        expected = exact(torch.tensor([[5, 6, 7]])).logits[0]
    ours = driver(load_model(path, dtype="float32")).forward_once({0: [5, 6, 7]})[0]
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


def test_old_style_rope_configuration(save_tiny: Callable, driver: Callable, tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling` with `type`, as written before transformers 5."""
    import json
    import shutil

    path, reference = save_tiny("Llama", rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0})
    shutil.copytree(path, tmp_path / "old")
    file = tmp_path / "old" / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"], config["head_dim"], config["dtype"]
    config |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "float32"}
    file.write_text(json.dumps(config))
    tokens = list(range(40))
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    ours = driver(load_model(tmp_path / "old")).forward_once({0: tokens})[0]
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
