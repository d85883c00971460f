"""Tiny random models in float32 that the engine tests share, and a way to run requests through an engine."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
from pathlib import Path

import pytest
import torch

from outrider import LoRARequest, SamplingParams
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.messages import EngineRequest
from outrider.platform.core.speculative_config import IN_TARGET_METHODS, MODEL_METHODS

VOCAB = 160
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MEDUSA_HEADS = 5


class Models:
    """Folders of a target, a draft that often agrees with it, and adapters of ranks 4, 8 and 3."""

    def __init__(self, root: Path, heads: Path) -> None:
        """`heads`: folder of the trained heads, which processes of a test run share."""
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM

        self.target, self.draft = root / "target", root / "draft"
        config = LlamaConfig(
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            vocab_size=VOCAB,
            max_position_embeddings=512,
            initializer_range=0.2,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
        )
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).float()
        model.save_pretrained(self.target)
        self.adapters = {}
        for name, rank in (("a", 4), ("b", 8), ("c", 3)):
            torch.manual_seed(rank)
            base = LlamaForCausalLM.from_pretrained(self.target)
            lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, init_lora_weights=False)
            self.adapters[name] = str(root / f"adapter-{name}")
            get_peft_model(base, lora).save_pretrained(self.adapters[name])
        for name, rank in (("a", 4), ("b", 2)):  # draft weights: `c` has none
            for method in ("eagle", "eagle3", "medusa", "dflash", "dspark"):
                self._write_head_lora(Path(self.adapters[name]) / "draft" / method, method, rank)
        with torch.no_grad():  # a drafter that is right about half of the time
            for parameter in model.parameters():
                parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
        model.save_pretrained(self.draft)
        for name, rank in (("a", 4), ("b", 2)):
            torch.manual_seed(10 + rank)
            base = LlamaForCausalLM.from_pretrained(self.draft)
            lora = LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS, init_lora_weights=False)
            get_peft_model(base, lora).save_pretrained(Path(self.adapters[name]) / "draft" / "draft_model")
        for name, rank in (("a", 4), ("b", 2)):
            torch.manual_seed(20 + rank)
            base = LlamaForCausalLM.from_pretrained(self.target)
            lora = LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS, init_lora_weights=False)
            get_peft_model(base, lora).save_pretrained(Path(self.adapters[name]) / "draft" / "uno")
        self._heads = heads

    @staticmethod
    def _write_head_lora(folder: Path, method: str, rank: int) -> None:
        """A PEFT adapter for a head of the target's size, with small random weights."""
        from safetensors.torch import save_file

        width = 96 if method == "eagle3" else 48  # an EAGLE-3 layer reads token and hidden state side by side
        generator = torch.Generator().manual_seed(rank)
        tensors = {}
        modules = {"layers.0.self_attn.q_proj": (width, 48), "layers.0.mlp.down_proj": (96, 48)}
        if method == "eagle3":
            modules["fc"] = (144, 48)
        elif method in ("dflash", "dspark"):
            modules |= {"fc": (144, 48), "layers.1.self_attn.k_proj": (48, 16), "layers.1.self_attn.v_proj": (48, 16)}
        elif method == "medusa":
            modules = {f"{head}.0.linear": (48, 48) for head in range(MEDUSA_HEADS)}
        for module, (size, out) in modules.items():
            key = f"base_model.model.{module}.lora"
            tensors[f"{key}_A.weight"] = 0.2 * torch.randn(rank, size, generator=generator)
            tensors[f"{key}_B.weight"] = 0.2 * torch.randn(out, rank, generator=generator)
        folder.mkdir(parents=True)
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(modules)}
        (folder / "adapter_config.json").write_text(json.dumps(config))

    def head(self, method: str) -> Path:
        """A head for the target, trained for some steps on random text: often wrong, sometimes right. The first process
        that needs it trains it; others wait."""
        folder = self._heads / method
        self._heads.mkdir(exist_ok=True)
        with (self._heads / f"{method}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                part = self._heads / f"{method}.part"
                self._train(method, part)
                part.rename(folder)
        return folder

    def _train(self, method: str, folder: Path) -> None:
        from outrider.spec_decode.training.data import Sample
        from outrider.spec_decode.training.options import TrainOptions
        from outrider.spec_decode.training.run import train_draft

        generator = torch.Generator().manual_seed(1)
        starts = torch.randint(3, VOCAB, (24, 12), generator=generator)
        texts = self.reference().generate(starts, max_new_tokens=24, do_sample=False, pad_token_id=2).tolist()
        samples = [Sample(text, 1) for text in texts]
        folder.mkdir(exist_ok=True)
        options = TrainOptions(
            method=method,
            model=str(self.target),
            data="",
            output=str(folder),
            steps=60,
            lr=1e-2,
            warmup=5,
            dtype="float32",
            batch_tokens=256,
            eval_every=1000,
            medusa_heads=MEDUSA_HEADS,
            progress=False,
            **({"block_size": 6, "draft_layers": 2} if method in ("dflash", "dspark") else {}),
            **({"block_size": 6, "rank": 12} if method == "uno" else {}),
        )
        train_draft(options, samples, samples[:2])

    def lora(self, name: str | None) -> LoRARequest | None:
        """The request for an adapter, None for the base."""
        return None if name is None else LoRARequest(name, path=self.adapters[name])

    def reference(self, name: str | None = None):
        """The model in transformers, with the adapter in PEFT."""
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.target, dtype=torch.float32).eval()
        return model if name is None else PeftModel.from_pretrained(model, self.adapters[name]).eval()

    def speculative(self, method: str | None, k: int) -> dict | None:
        """A `speculative_config`."""
        if method is None:
            return None
        config = {"method": method, "num_speculative_tokens": k}
        if method == "draft_model":
            config["model"] = str(self.draft)
        elif method in MODEL_METHODS and method not in IN_TARGET_METHODS:
            config["model"] = str(self.head(method))
        return config


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return Models(tmp_path_factory.mktemp("models"), run / "heads")


def build_engine(models, **options):
    """An engine over the tiny target in float32."""
    from outrider.platform.engine.engine_core import EngineCore

    values = {"model": str(models.target), "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "seed": 1}
    return EngineCore(EngineArgs(**(values | options)))


@pytest.fixture(scope="session")
def plain_engine(models):
    """One engine without speculation, with adapters, for the texts that others are compared with."""
    engine = build_engine(models, enable_lora=True, max_loras=3, max_lora_rank=8)
    yield engine
    engine.shutdown()


@pytest.fixture
def make_engine(models):
    """Engines that are checked and shut down at the end of the test."""
    engines = []

    def make(**options):
        engine = build_engine(models, **options)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        assert not engine.has_work()
        engine.check_integrity()
        assert engine.stats().num_running == engine.stats().num_waiting == 0
        assert engine.stats().kv_cache_usage == 0.0
        engine.shutdown()


class Outcome:
    """All that an engine reported of one sequence."""

    def __init__(self) -> None:
        self.token_ids, self.logprobs, self.deltas, self.accepted = [], [], [], []
        self.prompt_logprobs = self.finish_reason = self.stop_reason = self.error = self.speculation = None
        self.num_cached_tokens = 0

    def take(self, delta) -> None:
        self.deltas.append(delta.token_ids)
        self.accepted.append(delta.num_accepted)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs = list(delta.prompt_logprobs or ()) or self.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        for name in ("finish_reason", "stop_reason", "error", "speculation"):
            setattr(self, name, getattr(delta, name) or getattr(self, name))


@pytest.fixture(scope="session")
def run():
    """run(engine, [(prompt ids, SamplingParams, LoRARequest or None, fields...)]) -> outcomes in order."""
    numbers = itertools.count()

    def run(engine, jobs):
        outcomes = {}
        for prompt, params, *rest in jobs:
            lora, fields = [*rest, *(None, {})[len(rest) :]]
            request = EngineRequest(str(next(numbers)), list(prompt), params, [1], lora=lora, **fields)
            outcomes[request.request_id] = Outcome()
            engine.add_request(request)
        for _ in range(5000):
            if not engine.has_work():
                break
            for delta in engine.step():
                outcomes[delta.request_id].take(delta)
        assert not engine.has_work(), "did not finish"
        return list(outcomes.values())

    return run


@pytest.fixture(scope="session")
def plain_tokens(plain_engine, run):
    """plain_tokens(jobs) -> the tokens that `plain_engine` gives each of them; made once for the same jobs."""
    made = {}

    def plain_tokens(jobs):
        key = repr(jobs)
        if key not in made:
            made[key] = [outcome.token_ids for outcome in run(plain_engine, jobs)]
        return made[key]

    return plain_tokens


@pytest.fixture(scope="session")
def prompts():
    """Prompts of different lengths; some repeat themselves, so that n-grams match."""
    generator = torch.Generator().manual_seed(7)
    made = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (5, 17, 33, 60)]
    return [*made, [5, 6, 7, 8] * 6, made[1] * 2]


@pytest.fixture
def greedy():
    return SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture
def jobs(models, prompts):
    """jobs(params, adapters) -> every prompt with these parameters, on the base or on base and adapters in turn."""

    def jobs(params, adapters):
        names = [None, "a", "b", None, "a", "c"] if adapters else [None] * len(prompts)
        return [(p, params, models.lora(n)) for p, n in zip(prompts, names, strict=True)]

    return jobs


@pytest.fixture(scope="session")
def run_with_failures():
    """The tokens of each prompt from an engine whose forward pass fails three times."""

    def work(engine, prompts, params):
        forward, calls = engine._runner._model.forward, []

        def sometimes(*args):
            calls.append(None)
            if len(calls) in (1, 4, 9):
                raise RuntimeError("out of memory")
            return forward(*args)

        engine._runner._model.forward = sometimes
        for index, prompt in enumerate(prompts):
            engine.add_request(EngineRequest(str(index), list(prompt), params, [1]))
        texts, errors = {}, 0
        while engine.has_work():
            try:
                for delta in engine.step():
                    texts.setdefault(delta.request_id, []).extend(delta.token_ids)
            except RuntimeError as error:
                assert str(error) == "out of memory"  # noqa: PT017
                errors += 1
            engine.check_integrity()
        assert errors == 3
        return [texts[str(index)] for index in range(len(prompts))]

    return work
