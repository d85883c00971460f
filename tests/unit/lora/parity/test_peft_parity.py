"""Logits of mixed batches of base and adapter requests equal PEFT's, however the tokens are divided."""

import pytest
import torch

from outrider.lora.device.batching import LONG_RUN

from .reference import ALL, VOCAB, Engine, peft_logits, save_base, train

pytestmark = pytest.mark.slow

ADAPTERS = {
    "every": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "small": {"r": 3, "lora_alpha": 12, "target_modules": ALL, "use_rslora": True},
    "some": {"r": 4, "lora_alpha": 4, "target_modules": r".*\.(v_proj|down_proj)", "layers_to_transform": None},
    "patterns": {
        "r": 2,
        "lora_alpha": 6,
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 7, r"layers\.1\.mlp\.up_proj": 5},
        "alpha_pattern": {"k_proj": 3, r"layers\.0\.self_attn\.q_proj": 20},
        "exclude_modules": ["o_proj"],
    },
    "head": {"r": 5, "lora_alpha": 5, "target_modules": ["lm_head"]},
    "tokens": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "v_proj"], "use_rslora": True},
    "both": {
        "r": 3,
        "lora_alpha": 3,
        "target_modules": ["embed_tokens", "lm_head", *ALL],
        "rank_pattern": {"lm_head": 6, "model.embed_tokens": 2},
        "alpha_pattern": {"embed_tokens": 7},
    },
    # If the base ties its head, PEFT trains one adapter for both and stores it twice.
    "tying": {"r": 4, "lora_alpha": 4, "target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
}
LENGTHS = {
    "base": 9,
    "every": LONG_RUN + 11,
    "head": LONG_RUN + 2,
    "some": 5,
    "tokens": 30,
    "patterns": 40,
    "both": 18,
    "small": 21,
    "tying": 11,
    "head 2": 1,
    "base 2": LONG_RUN + 3,
    "every 2": 1,
}


@pytest.fixture(scope="module", params=[("Llama", False), ("Qwen2", True), ("Qwen3", False), ("Llama", True)], ids=str)
def case(request, tmp_path_factory):
    """(model folder, adapters' folders, prompts by request, PEFT's logits by request)."""
    family, tied = request.param
    folder = tmp_path_factory.mktemp(family.lower())
    base = save_base(folder / "base", family, tied)
    prompts = {name: torch.randint(3, VOCAB, (length,)).tolist() for name, length in LENGTHS.items()}
    paths = {name: str(folder / name) for name in ADAPTERS}
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        train(base, seed, **options).save_pretrained(paths[name])
    logits = {name: peft_logits(base, paths.get(name.split()[0]), prompt) for name, prompt in prompts.items()}
    return base, paths, prompts, logits


@pytest.mark.parametrize("chunk_sizes", [(1000,), (1,), (7, 2, 30, 1, LONG_RUN)], ids=["whole", "one by one", "chunks"])
def test_mixed_batch(case, chunk_sizes):
    path, paths, prompts, expected = case
    engine = Engine(path, paths, prompts)
    engine.admit(prompts)
    got = engine.run(prompts, chunk_sizes)
    for name in prompts:
        torch.testing.assert_close(
            got[name], expected[name], atol=1e-4, rtol=0, msg=lambda text, n=name: f"{n}: {text}"
        )
    engine.close()


def test_adapters_differ_from_the_base_by_far_more_than_the_tolerance(case):
    path, _, prompts, expected = case
    engine = Engine(path, {}, prompts)
    got = engine.run(prompts)
    for name in prompts:
        difference = (got[name] - expected[name]).abs().max()
        assert difference < 1e-4 if name.startswith("base") else difference > 0.1, name
    engine.close()


def test_rows_that_pass_from_adapter_to_adapter(case):
    """One adapter fits at a time: each finds its rows cleared of the one before."""
    path, paths, prompts, expected = case
    engine = Engine(path, paths, prompts, max_loras=1)
    for name in prompts:
        engine.admit([name])
        got = engine.run([name])
        torch.testing.assert_close(got[name], expected[name], atol=1e-4, rtol=0)
        engine.manager.forget(engine.requests[name])
    engine.close()
