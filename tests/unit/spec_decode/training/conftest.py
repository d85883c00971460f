"""A tiny target with the demo's tokenizer, an adapter of it, and samples that it wrote."""

import shutil
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from outrider.models.demo import demo_model_path
from outrider.spec_decode.training.data import Sample
from outrider.spec_decode.training.options import TrainOptions

VOCAB = 2048
CPU = torch.device("cpu")


def save_target(folder, **sizes):
    """A random Llama whose greedy text settles into patterns that a head can learn."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 256, "initializer_range": 0.12}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape | sizes, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2))
    model.float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(demo_model_path() / name, folder / name)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """`target`, `adapter` of it, and `draft`, a smaller causal LM."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    root = tmp_path_factory.mktemp("training")
    save_target(root / "target")
    save_target(root / "draft", hidden_size=16, num_hidden_layers=1, intermediate_size=24, num_attention_heads=2)
    torch.manual_seed(1)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(LlamaForCausalLM.from_pretrained(root / "target"), config).save_pretrained(root / "adapter")
    return SimpleNamespace(**{name: str(root / name) for name in ("target", "adapter", "draft")})


@pytest.fixture(scope="session")
def samples(folders):
    """Greedy texts of the target after random prompts of different lengths."""
    from transformers import LlamaForCausalLM

    model, rng = LlamaForCausalLM.from_pretrained(folders.target), Random(0)
    found = []
    for _ in range(40):
        prompt = [rng.randrange(6, VOCAB) for _ in range(rng.randint(1, 9))]
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        found.append(Sample(out[0].tolist(), len(prompt)))
    return found


@pytest.fixture
def options(folders, tmp_path):
    """Makes options of a small run in float32."""

    def make(method="eagle3", **more):
        values = {"model": folders.target, "data": "", "output": str(tmp_path), "dtype": "float32", "progress": False}
        values |= {"steps": 6, "batch_tokens": 256, "eval_every": 3, "warmup": 2}
        if method not in ("medusa", "dflash", "dspark", "uno") and more.get("draft") != folders.draft:
            values["unroll"] = 3
        chosen = TrainOptions(method=method, **values | more)
        Path(chosen.output).mkdir(parents=True, exist_ok=True)
        chosen.check()
        return chosen

    return make


@pytest.fixture(scope="session")
def read_batch(folders):
    """Runs a target over samples: (target, features)."""
    from outrider.spec_decode.training.data import collate
    from outrider.spec_decode.training.target import load_target

    def read(samples, aux_layers=None, adapter=None):
        target = load_target(folders.target, adapter, torch.float32, CPU, aux_layers)
        return target, target.features(collate(samples, CPU))

    return read
