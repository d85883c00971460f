"""Adapters that were trained with a resized vocabulary give PEFT's logits, in batches with requests of the base model,
whose logits never have the added tokens."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from outrider.platform.core.errors import AdapterError

from .reference import VOCAB, Engine, load_base, peft_logits, save_base

pytestmark = pytest.mark.slow

SIZE = VOCAB + 5
PROMPT = [3, VOCAB, 9, SIZE - 1, VOCAB + 2, 7]
KINDS = {
    "plain": {},
    "saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "saved-table": {"modules_to_save": ["embed_tokens"]},
    "tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "rows": {"trainable_token_indices": [3, 9, VOCAB, SIZE - 1]},
    "low-rank": {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_rslora": True},
    "only-vocabulary": {"target_modules": ["embed_tokens", "lm_head"]},
}
CAPPED = {"final_logit_softcapping": 3.0, "head_dim": 12}


def train_resized(base, seed, size=SIZE, **options):
    torch.manual_seed(seed)
    resized = load_base(base)
    resized.resize_token_embeddings(size, mean_resizing=False)
    for module in (resized.get_input_embeddings(), resized.get_output_embeddings()):
        torch.nn.init.normal_(module.weight.data[VOCAB:], 0.0, 0.3)
    model = get_peft_model(
        resized, LoraConfig(r=3, init_lora_weights=False, **{"target_modules": ["q_proj"], **options})
    )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" not in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


@torch.inference_mode()
def resized_logits(base, path, prompt):
    """PEFT's logits, as its documentation says: the base model is resized before the adapter is loaded."""
    model = load_base(base)
    model.resize_token_embeddings(SIZE, mean_resizing=False)
    return PeftModel.from_pretrained(model, path).eval()(torch.tensor([prompt])).logits[0]


@pytest.fixture(scope="module", params=[("Llama", False, {}), ("Qwen2", True, {}), ("Gemma2", True, CAPPED)], ids=str)
def case(request, tmp_path_factory):
    family, tied, more = request.param
    folder = tmp_path_factory.mktemp(family.lower())
    base = save_base(folder / "base", family, tied, **more)
    paths = {name: str(folder / name) for name in KINDS}
    for seed, (name, options) in enumerate(KINDS.items()):
        train_resized(base, seed, **options).save_pretrained(paths[name])
    return base, paths


def test_logits_are_those_of_peft_and_the_base_has_no_added_token(case):
    base, paths = case
    prompts = {"base": [3, 5, 9, 11]} | dict.fromkeys(paths, PROMPT) | {"base-2": [7, 4, 2]}
    engine = Engine(base, paths, prompts)
    engine.admit(prompts)
    for chunks in ((1000,), (2, 3)):
        for name, logits in engine.run(list(prompts), chunks).items():
            if name.startswith("base"):
                expected = peft_logits(base, None, prompts[name])
            else:
                expected = resized_logits(base, paths[name], PROMPT)
            size = expected.shape[1]
            torch.testing.assert_close(
                logits[:, :size], expected, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
            assert bool((logits[:, size:] == -torch.inf).all()), name
    alone = engine.run(["base"])["base"]
    assert alone.shape[1] == VOCAB
    engine.close()


def test_rows_that_equal_the_base_models_are_not_kept(case):
    """A vocabulary that was only resized costs its added rows, not a copy of all."""
    base, paths = case
    engine = Engine(base, paths, {"plain": PROMPT, "saved": PROMPT})
    engine.admit(["plain", "saved"])
    sizes = {info.name: info.num_bytes for info in engine.manager.catalog.list()}
    assert sizes["saved"] - sizes["plain"] >= 1.9 * VOCAB * 48 * 4
    engine.close()


@pytest.mark.parametrize(
    ("options", "most", "message"),
    [
        # PEFT leaves the table out: the added tokens' embeddings are unknown
        ({"target_modules": ["lm_head"]}, 5, "lm_head has 136 tokens, and model.embed_tokens only 131"),
        ({}, 4, "adds 5 tokens to the vocabulary; at most 4"),
        ({"alora_invocation_tokens": [5]}, 5, "alora_invocation_tokens is not served with"),
        ({"target_modules": ["embed_tokens"], "use_dora": True}, 5, "DoRA and biases are not served with a larger"),
    ],
    ids=["table", "limit", "activated", "dora"],
)
def test_misfits_are_refused(case, tmp_path, monkeypatch, options, most, message):
    base, _ = case
    path = str(tmp_path / "adapter")
    train_resized(base, 1, **options).save_pretrained(path)
    monkeypatch.setattr("outrider.lora.files.vocabulary.MAX_ADDED_TOKENS", most)
    engine = Engine(base, {"one": path}, {"one": PROMPT})
    with pytest.raises(AdapterError, match=message):
        engine.admit(["one"])
    engine.close()
