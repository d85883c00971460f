"""Adapters on the products of latents (`kv_b_proj`), which the model never computes: logits are PEFT's."""

import pytest
import torch

from outrider.platform.core.errors import AdapterError

from .reference import VOCAB, Engine, peft_logits, save_base, train

pytestmark = pytest.mark.slow

SIZES = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
ALL = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
ADAPTERS = {
    "one": {"r": 4, "target_modules": ["kv_b_proj"]},
    "all": {"r": 3, "target_modules": ALL, "use_rslora": True},
    "dora": {"r": 2, "target_modules": ["kv_b_proj", "o_proj"], "use_dora": True},
    "bias": {"r": 2, "target_modules": ["kv_b_proj", "q_b_proj"], "lora_bias": True},
    "else": {"r": 2, "target_modules": ["q_b_proj"]},
    "layer": {"r": 5, "target_modules": ["kv_b_proj"], "layers_to_transform": [1]},
}
LENGTHS = {"base": 9, "one": 70, "all": 23, "dora": 12, "bias": 30, "else": 8, "layer": 17, "one 2": 5}


@pytest.fixture(scope="module", params=["DeepseekV2", "DeepseekV3"])
def case(request, tmp_path_factory):
    """(model folder, adapters' folders, prompts by request)."""
    folder = tmp_path_factory.mktemp("latents")
    more = {"n_group": 1, "topk_group": 1} if request.param == "DeepseekV3" else {}
    base = save_base(folder / "base", request.param, False, **SIZES, **more)
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        train(base, seed, lora_alpha=6, **options).save_pretrained(folder / name)
    generator = torch.Generator().manual_seed(0)
    prompts = {name: torch.randint(3, VOCAB, (count,), generator=generator).tolist() for name, count in LENGTHS.items()}
    return base, {name: str(folder / name) for name in ADAPTERS}, prompts


@pytest.mark.parametrize("chunk_sizes", [(1000,), (7, 2, 30, 1)], ids=["whole", "chunks"])
def test_mixed_batch(case, chunk_sizes):
    base, paths, prompts = case
    engine = Engine(base, paths, prompts)
    engine.admit(prompts)
    got = engine.run(prompts, chunk_sizes)
    plain = Engine(base, {}, prompts)
    for name in prompts:
        expected = peft_logits(base, paths.get(name.split()[0]), prompts[name])
        torch.testing.assert_close(got[name], expected, atol=1e-4, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
        assert name == "base" or (plain.run([name])[name] - expected).abs().max() > 0.05, name
    engine.close()


def test_a_row_of_a_batch_has_the_bits_that_it_has_alone(case):
    base, paths, prompts = case
    engine = Engine(base, paths, prompts, dtype="bfloat16", batch_invariant=True)
    engine.admit(prompts)
    together = engine.run(prompts, (5, 40))
    for name in ("base", "one", "dora"):
        assert torch.equal(engine.run([name])[name], together[name])
    engine.close()


def test_an_activated_adapter_is_refused_by_name(case, tmp_path):
    """The base model's keys would be needed before its invocation."""
    base, *_ = case
    train(base, 0, r=2, target_modules=ALL, alora_invocation_tokens=[7, 8]).save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match=r"kv_b_proj: alora_invocation_tokens is not served"):
        Engine(base, {"a": str(tmp_path)}, {"a": [5, 6]}).admit(["a"])
