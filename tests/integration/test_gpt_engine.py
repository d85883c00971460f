"""Engines of GPT-2 and OPT: greedy text is that of transformers up to the last position, and with heads that draft."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from outrider import LoRARequest, SamplingParams
from outrider.platform.core.errors import InvalidRequestError

VOCAB, CONTEXT = 160, 96
SIZES = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": CONTEXT,
    "vocab_size": VOCAB, "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "gpt2": (transformers.GPT2Config(**SIZES), ["c_attn", "c_proj", "c_fc"]),
    "opt-projected": (
        transformers.OPTConfig(**SIZES, ffn_dim=80, word_embed_proj_dim=24, do_layer_norm_before=False, init_std=0.2),
        ["project_in", "project_out", "fc1"],
    ),
}
GREEDY = SamplingParams(temperature=0, max_tokens=CONTEXT, ignore_eos=True)


class Family:
    """A tiny model with an adapter, and transformers' texts."""

    def __init__(self, root, config, targets) -> None:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        self.is_projected = "project_in" in targets
        self.folder, adapter = str(root / "base"), str(root / "adapter")
        base = transformers.AutoModelForCausalLM.from_config(config).eval()
        base.generation_config.eos_token_id = None
        base.save_pretrained(self.folder)
        tokens = torch.randint(3, VOCAB, (60,)).tolist()
        self.prompts = [tokens, tokens[:40] + [5, 6, 7] * 5, [9, 8, 7] * 6, tokens[:1]]
        self.texts = [[self._generate(base, prompt)] for prompt in self.prompts]
        tuned = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False))
        for prompt, texts in zip(self.prompts, self.texts, strict=True):
            texts.append(self._generate(tuned, prompt))
        tuned.save_pretrained(adapter)
        lora = LoRARequest("a", path=adapter)
        self.jobs = [(prompt, GREEDY, which) for prompt in self.prompts for which in (None, lora)]
        self.wanted = [text for texts in self.texts for text in texts]

    @staticmethod
    def _generate(model, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        count = CONTEXT - len(prompt)
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> Family:
    return Family(tmp_path_factory.mktemp(request.param), *FAMILIES[request.param])


def start_engine(make_engine, family: Family, **options):
    values = {"model": family.folder, "max_model_len": CONTEXT, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    return make_engine(**(values | options))


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_texts(make_engine, run, family, method):
    config = {"method": method, "num_speculative_tokens": 4}
    if method == "draft_model":
        config["model"] = family.folder
    engine = start_engine(make_engine, family, speculative_config=config, max_num_batched_tokens=64)
    assert [outcome.token_ids for outcome in run(engine, family.jobs)] == family.wanted


@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa"])
def test_heads(make_engine, run, family, method, tmp_path):
    """Heads of random weights change no text."""
    config = {"hidden_size": 48, "vocab_size": VOCAB, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    if method == "medusa":
        config = {"vocab_size": VOCAB, "medusa_num_heads": 2, "medusa_num_layers": 1}
    config |= {"num_attention_heads": 4, "intermediate_size": 64, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"enable_lora": False, "load_format": "dummy", "max_num_seqs": 4}
    jobs = [(prompt, GREEDY) for prompt in family.prompts]
    plain = run(start_engine(make_engine, family, **options), jobs)
    speculative = {"method": method, "model": str(tmp_path), "num_speculative_tokens": 2}
    if family.is_projected and method != "medusa":
        with pytest.raises(InvalidRequestError, match="different sizes"):
            start_engine(make_engine, family, speculative_config=speculative, **options)
        return
    drafted = run(start_engine(make_engine, family, speculative_config=speculative, **options), jobs)
    assert [outcome.token_ids for outcome in drafted] == [outcome.token_ids for outcome in plain]
