"""Real models, fetched once into a cache by `tools/real_models.py`, adapters trained here, and transformers."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, LoRARequest, SamplingParams

SMALL, LARGER = "smollm2-135m-instruct", "gemma-3-270m"
EASY = ["Paris is the capital of France.", "An apple a day keeps the doctor away."]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the larger models too")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model_name" in metafunc.fixturenames:
        names = [SMALL, LARGER] if metafunc.config.getoption("--all") else [SMALL]
        metafunc.parametrize("model_name", names, scope="session")


class RealModel:
    """A model as a GGUF file and as a folder."""

    def __init__(self, name: str, root: Path, work: Path) -> None:
        spec = importlib.util.spec_from_file_location("real_models", root / "tools" / "real_models.py")
        tools = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tools)
        cache = Path(os.environ.get("OUTRIDER_REAL_MODELS", tools.CACHE))
        self.name, self.work = name, work
        self.gguf: Path = tools.real_gguf_path(name, cache)
        self.folder: Path = tools.real_model_path(name, cache)
        self.adapters: dict[str, LoRARequest] = {}
        self._base: Any = None

    def reference(self, adapter: LoRARequest | None = None) -> Any:
        """The file as transformers reads it, in float32; the folder's weights were rounded to bfloat16."""
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, GgufConfig

        if self._base is None:
            self._base = AutoModelForCausalLM.from_pretrained(
                self.gguf.parent,
                gguf_file=self.gguf.name,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
            )
        model = copy.deepcopy(self._base)
        return (model if adapter is None else PeftModel.from_pretrained(model, adapter.path)).eval()

    def train_adapters(self) -> None:
        """Three adapters of different forms, trained for some steps so that each of them changes the text."""
        from peft import LoraConfig, get_peft_model

        from outrider.models.checkpoint.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self.folder)
        mlp = ["gate_proj", "up_proj", "down_proj"]
        forms = {
            "attention": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
            "scaled": {"r": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", *mlp], "use_rslora": True},
            "dora": {"r": 4, "target_modules": mlp, "use_dora": True},
        }
        for seed, (name, form) in enumerate(forms.items()):
            torch.manual_seed(seed)
            model = get_peft_model(self.reference(), LoraConfig(lora_alpha=16, **form))
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
            words = " ".join(f"{name} {index}" for index in range(12))
            batch = tokenizer([f"{text} {words}" for text in EASY], return_tensors="pt", padding=True)
            for _ in range(4):
                model(**batch, labels=batch["input_ids"]).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            model.save_pretrained(self.work / name)
            self.adapters[name] = LoRARequest(name, path=str(self.work / name))

    def drafted(self, name: str, folder: Path, head: Path | None = None) -> LoRARequest:
        """An adapter as a copy in `folder` with draft weights: itself for a draft model that is the model, and a random
        LoRA for the head, of which `head` is the folder."""
        shutil.copytree(self.adapters[name].path, folder)
        shutil.copytree(self.adapters[name].path, folder / "draft" / "draft_model")
        if head is not None:
            generator = torch.Generator().manual_seed(1)
            tensors, prefix = {}, "base_model.model."
            whole, pickled = head / "model.safetensors", head / "medusa_lm_head.pt"
            weights = load_file(whole) if whole.exists() else torch.load(pickled, weights_only=True)
            for key, weight in weights.items():
                module = key.replace("midlayer", "layers.0").removesuffix(".weight")
                if not module.endswith(("_proj", "fc", ".linear")):
                    continue
                for part, shape in {"A": (4, weight.shape[1]), "B": (weight.shape[0], 4)}.items():
                    values = torch.randn(shape, generator=generator) * 0.1
                    tensors[f"{prefix}{module}.lora_{part}.weight"] = values
            for method in ("eagle3", "medusa"):
                (folder / "draft" / method).mkdir()
                save_file(tensors, folder / "draft" / method / "adapter_model.safetensors")
                config = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4})
                (folder / "draft" / method / "adapter_config.json").write_text(config)
        return LoRARequest("drafted", path=str(folder))


@pytest.fixture(scope="session")
def model(model_name: str, repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> RealModel:
    """The model, or a skip if no package index has it."""
    try:
        real = RealModel(model_name, repo_root, tmp_path_factory.mktemp(model_name))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no package index has {model_name}: {error}")
    real.train_adapters()
    return real


@pytest.fixture(scope="session")
def reference(model: RealModel) -> Any:
    return model.reference()


@pytest.fixture
def make_llm(model: RealModel) -> Any:
    """make_llm(**options) -> LLM of the GGUF file in float32, shut down after the test."""
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        values = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 32, "kv_cache_memory_bytes": 512 << 20}
        made.append(LLM(str(model.gguf), **(values | options)))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


@pytest.fixture(scope="session")
def check_greedy() -> Callable:
    """check_greedy(reference, output): each token is the one that transformers finds most likely after those before."""

    @torch.inference_mode()
    def check(reference: Any, output: Any) -> None:
        prompt, found = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        logits = reference(torch.tensor([prompt + found]), logits_to_keep=len(found) + 1).logits[0, :-1]
        assert found == logits.argmax(-1).tolist(), output.prompt

    return check


@pytest.fixture(scope="session")
def greedy() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=16)
