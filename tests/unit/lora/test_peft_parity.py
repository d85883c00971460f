"""Logits of mixed batches of base and adapter requests equal PEFT's, however the tokens are divided."""

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from outrider.lora.batching import LONG_RUN
from outrider.lora.manager import AdapterManager
from outrider.lora.sites import AdapterHooks
from outrider.models.batch import SequenceRows, allocate_kv, build_batch
from outrider.models.loader import load_model
from outrider.platform.core.config import LoRAConfig

from .conftest import make_request

BLOCK_SIZE = 8
CONFIG = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 256,
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
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
    # Where the base ties its head, PEFT trains one adapter for both and stores it twice.
    "tying": {"r": 4, "lora_alpha": 4, "target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
}
LENGTHS = {
    "base": 9,
    "every": LONG_RUN + 11,
    "small": 21,
    "some": 5,
    "patterns": 40,
    "head": LONG_RUN + 2,
    "tokens": 30,
    "both": 18,
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
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**CONFIG, tie_word_embeddings=tied)
    hf = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in hf.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3 if name.endswith("bias") else parameter.shape[-1] ** -0.5)
    hf.save_pretrained(folder / "base")
    load = getattr(transformers, f"{family}ForCausalLM").from_pretrained
    prompts = {name: torch.randint(3, 131, (length,)).tolist() for name, length in LENGTHS.items()}
    logits, paths = {}, {}
    for index, (adapter, options) in enumerate({"base": None, **ADAPTERS}.items()):
        model = load(folder / "base", dtype=torch.float32)
        if options is not None:
            torch.manual_seed(100 + index)
            paths[adapter] = str(folder / adapter)
            get_peft_model(model, LoraConfig(init_lora_weights=False, **options)).save_pretrained(paths[adapter])
            model = PeftModel.from_pretrained(load(folder / "base", dtype=torch.float32), paths[adapter])
        for name in (name for name in prompts if name.split()[0] == adapter):
            with torch.inference_mode():
                logits[name] = model.eval()(torch.tensor([prompts[name]])).logits[0]
    return folder / "base", paths, prompts, logits


class Engine:
    """A model, its cache and its adapters, driven by hand."""

    def __init__(self, path, paths, names, max_loras=8):
        self.model = load_model(path, dtype="float32")
        config = LoRAConfig(max_loras=max_loras, max_cpu_loras=8, max_lora_rank=8)
        hooks = AdapterHooks(embedding=self.model.embedding)
        self.manager = AdapterManager(self.model.linears(), config, torch.float32, "cpu", hooks)
        self.kv = allocate_kv(self.model.kv_layers, 100, BLOCK_SIZE, torch.float32)
        self.requests, self.tables, self.computed = {}, {}, dict.fromkeys(names, 0)
        blocks = iter(range(100))
        for name in names:
            adapter = name.split()[0]
            self.requests[name] = make_request(adapter if adapter in paths else None, paths.get(adapter), name)
            self.tables[name] = [next(blocks) for _ in range(-(-LENGTHS[name] // BLOCK_SIZE))]
            self.manager.resolve(self.requests[name])

    def admit(self, names):
        for name in names:
            while (reason := self.manager.admit(self.requests[name])) is not None:
                assert reason == "adapter_loading"
                self.manager.wait(10)

    def step(self, chunks):
        adapters, head = (
            prepare([(self.requests[name].adapter, len(chunk)) for name, chunk in chunks.items()])
            for prepare in (self.manager.prepare, self.manager.prepare_head)
        )
        rows = SequenceRows(
            token_ids=[token for chunk in chunks.values() for token in chunk],
            query_lens=[len(chunk) for chunk in chunks.values()],
            starts=[self.computed[name] for name in chunks],
            block_tables=[self.tables[name] for name in chunks],
        )
        with torch.inference_mode():
            logits = self.model.compute_logits(
                self.model.forward(build_batch(rows, self.model, self.kv, adapters)).hidden, head
            ).split(rows.query_lens)
        for name, chunk in chunks.items():
            self.computed[name] += len(chunk)
        return dict(zip(chunks, logits, strict=True))

    def run(self, prompts, chunk_sizes):
        """All prompts in chunks of (cyclically) these sizes, in one batch; whole logits by name."""
        parts = {name: [] for name in prompts}
        step = 0
        while left := [name for name in prompts if self.computed[name] < len(prompts[name])]:
            chunks = {}
            for index, name in enumerate(left):
                start = self.computed[name]
                chunks[name] = prompts[name][start : start + chunk_sizes[(step + index) % len(chunk_sizes)]]
            for name, logits in self.step(chunks).items():
                parts[name].append(logits)
            step += 1
        return {name: torch.cat(part) for name, part in parts.items()}

    def close(self):
        for request in self.requests.values():
            self.manager.release(request)
        self.manager.check_integrity()
        self.manager.close()


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
    got = engine.run(prompts, (1000,))
    for name in prompts:
        difference = (got[name] - expected[name]).abs().max()
        assert difference < 1e-4 if name.startswith("base") else difference > 0.1, name
    engine.close()


def test_rows_that_pass_from_adapter_to_adapter(case):
    """One adapter fits at a time: each finds its rows cleared of the one before."""
    path, paths, prompts, expected = case
    engine = Engine(path, paths, prompts, max_loras=1)
    for name in ("every", "head", "some", "tokens", "patterns", "both", "small", "head 2", "tying", "every 2"):
        engine.admit([name, "base"])
        got = engine.run({name: prompts[name]}, (1000,))
        torch.testing.assert_close(got[name], expected[name], atol=1e-4, rtol=0)
        engine.manager.release(engine.requests[name])
    engine.close()
