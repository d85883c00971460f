"""Logits of mixes equal PEFT's, in one batch with their parts, with other mixes of them and with the base model."""

from itertools import count

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer

from outrider.lora.device.batching import LONG_RUN
from outrider.lora.device.sites import AdapterHooks
from outrider.lora.manager import AdapterManager
from outrider.models.batch import SequenceRows, allocate_kv, build_batch
from outrider.models.checkpoint.loader import load_model
from outrider.platform.core.config import LoRAConfig
from outrider.platform.core.lora_request import LoRAMix, LoRARequest, mix_of
from outrider.platform.core.request import Request
from outrider.platform.core.sampling_params import SamplingParams

BLOCK_SIZE = 8
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "every": {"r": 6, "lora_alpha": 12, "target_modules": ALL},
    "some": {"r": 3, "lora_alpha": 3, "target_modules": ["v_proj", "down_proj"], "use_rslora": True, "lora_bias": True},
    "words": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
}
JOBS = [  # (number of tokens, weights of the adapters)
    (9, {}),
    (LONG_RUN + 5, {"every": 0.7, "some": 0.3}),
    (21, {"every": 0.3, "some": 0.7}),
    (17, {"every": 1.0}),
    (12, {"some": -1.5}),
    (30, {"words": 0.5, "every": -0.25, "some": 2.0}),
    (LONG_RUN + 2, {"words": 1.0}),
    (1, {"words": 1.0, "some": 1.0}),
    (33, {}),
]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """(model folder, adapters' folders, prompts, PEFT's logits)."""
    folder = tmp_path_factory.mktemp("mixes")
    config = transformers.LlamaConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=131, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder / "base")

    def load():
        return transformers.LlamaForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)

    for index, (name, options) in enumerate(ADAPTERS.items()):
        torch.manual_seed(100 + index)
        get_peft_model(load(), LoraConfig(init_lora_weights=False, **options)).save_pretrained(folder / name)
    peft = PeftModel.from_pretrained(load(), folder / "every", adapter_name="every")
    for name in ("some", "words"):
        peft.load_adapter(folder / name, adapter_name=name)
    prompts = [torch.randint(3, 131, (length,)).tolist() for length, _ in JOBS]
    expected = [_peft_logits(peft.eval(), prompt, weights) for prompt, (_, weights) in zip(prompts, JOBS, strict=True)]
    return folder / "base", {name: str(folder / name) for name in ADAPTERS}, prompts, expected


@torch.inference_mode()
def _peft_logits(peft, prompt, weights):
    """With several active adapters, each with its scaling."""
    ids = torch.tensor([prompt])
    if not weights:
        with peft.disable_adapter():
            return peft(ids).logits[0]
    peft.base_model.set_adapter([*weights])
    layers = [module for module in peft.modules() if isinstance(module, LoraLayer)]
    before = [dict(layer.scaling) for layer in layers]
    for layer in layers:
        layer.scaling.update({name: layer.scaling[name] * w for name, w in weights.items() if name in layer.scaling})
    logits = peft(ids).logits[0]
    for layer, scaling in zip(layers, before, strict=True):
        layer.scaling.update(scaling)
    return logits


class Engine:
    """A model, its cache and its adapters, driven by hand."""

    def __init__(self, path, paths, prompts):
        self.model = load_model(path, dtype="float32")
        config = LoRAConfig(max_loras=8, max_cpu_loras=16, max_lora_rank=8)
        hooks = AdapterHooks(embedding=self.model.embedding)
        self.manager = AdapterManager(self.model.linears(), config, torch.float32, "cpu", hooks)
        self.kv = allocate_kv(self.model.kv_layers, 60, BLOCK_SIZE, torch.float32)
        blocks = count()
        self.tables = [[next(blocks) for _ in range(-(-len(prompt) // BLOCK_SIZE))] for prompt in prompts]
        self.requests = []
        for index, (_, weights) in enumerate(JOBS):
            lora = mix_of([(LoRARequest(name, path=paths[name]), weight) for name, weight in weights.items()])
            request = Request(str(index), [3], 1, SamplingParams(), seed_key=0, lora=lora, order=(0, index))
            self.manager.resolve(request)
            self.requests.append(request)
        for request in self.requests:
            while self.manager.admit(request) is not None:
                self.manager.wait(10)

    def step(self, prompts, starts, size):
        """The logits of the next `size` tokens of every prompt that has more."""
        left = [index for index, prompt in enumerate(prompts) if starts[index] < len(prompt)]
        chunks = [prompts[index][starts[index] : starts[index] + size] for index in left]
        adapters, head = (
            prepare([(self.requests[index].adapter, len(chunk)) for index, chunk in zip(left, chunks, strict=True)])
            for prepare in (self.manager.prepare, self.manager.prepare_head)
        )
        rows = SequenceRows(
            token_ids=[token for chunk in chunks for token in chunk],
            query_lens=[len(chunk) for chunk in chunks],
            starts=[starts[index] for index in left],
            block_tables=[self.tables[index] for index in left],
        )
        with torch.inference_mode():
            hidden = self.model.forward(build_batch(rows, self.model, self.kv, adapters)).hidden
            logits = self.model.compute_logits(hidden, head).split(rows.query_lens)
        return dict(zip(left, logits, strict=True))


@pytest.mark.parametrize("size", [1000, 1, 7])
def test_mixes_in_a_mixed_batch(case, size):
    path, paths, prompts, expected = case
    engine = Engine(path, paths, prompts)
    assert sum(isinstance(request.lora, LoRAMix) for request in engine.requests) == 5
    parts, starts = [[] for _ in prompts], [0] * len(prompts)
    while any(start < len(prompt) for start, prompt in zip(starts, prompts, strict=True)):
        for index, logits in engine.step(prompts, starts, size).items():
            parts[index].append(logits)
            starts[index] += len(logits)
    for index, logits in enumerate(expected):
        torch.testing.assert_close(
            torch.cat(parts[index]), logits, atol=1e-4, rtol=0, msg=lambda t, i=index: f"{i}: {t}"
        )
    for request in engine.requests:
        engine.manager.forget(request)
    engine.manager.check_integrity()
    engine.manager.close()


def test_mixes_differ_by_far_more_than_the_tolerance(case):
    """On the same prompt: the base, the parts, and two mixes of them."""
    path, paths, prompts, _ = case
    peft = PeftModel.from_pretrained(
        transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32), paths["every"], adapter_name="every"
    )
    peft.load_adapter(paths["some"], adapter_name="some")
    choices = [weights for _, weights in JOBS[:5]]
    logits = [_peft_logits(peft.eval(), prompts[4], weights) for weights in choices]
    for i, one in enumerate(logits):
        for other in logits[:i]:
            assert (one - other).abs().max() > 0.1
