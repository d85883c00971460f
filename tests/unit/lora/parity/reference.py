"""Real adapters, PEFT's logits for them, and an engine's model driven by hand to be compared."""

import copy
import functools

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from outrider.lora.device.sites import AdapterHooks
from outrider.lora.manager import AdapterManager
from outrider.models.batch import SequenceRows, allocate_kv, build_batch
from outrider.models.checkpoint.loader import load_model
from outrider.platform.core.config import LoRAConfig

from ..conftest import make_request

BLOCK_SIZE = 8
VOCAB = 131
CONFIG = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def save_base(folder, family, tied, **more):
    """A model of a family whose logits are far from zero; returns its folder."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **{**CONFIG, "tie_word_embeddings": tied, "pad_token_id": None, **more}
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3 if name.endswith("bias") else parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


# Its text does not matter here, and takes a tenth of the time.
PeftModel.create_or_update_model_card = lambda model, folder: None


def load_base(folder):
    """The HF model of a folder, which the caller may change."""
    return copy.deepcopy(_loaded(folder))


@functools.lru_cache(2)
def _loaded(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def train(base, seed, *, init_lora_weights=False, **options):
    """A PEFT model whose adapter is random in all its parts."""
    torch.manual_seed(seed)
    model = get_peft_model(load_base(base), LoraConfig(init_lora_weights=init_lora_weights, **options))
    for name, parameter in model.named_parameters():
        if "lora_magnitude_vector" in name:
            parameter.data *= 1 + 0.3 * torch.randn_like(parameter)
        elif parameter.requires_grad and (name.endswith(".bias") or "trainable_tokens_delta" in name):
            parameter.data += torch.randn_like(parameter)
        elif "modules_to_save" in name:
            parameter.data += 0.3 * torch.randn_like(parameter) * (options["modules_to_save"] != ["lm_head"])
        elif "lora_B" in name and init_lora_weights in ("gaussian", "orthogonal"):  # no delta yet
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


@torch.inference_mode()
def peft_logits(base, path, prompt):
    """[len(prompt), vocab] of PEFT with the adapter of a folder; None: of the base model."""
    model = load_base(base)
    if path is not None:
        model = PeftModel.from_pretrained(model, path)
    return model.eval()(torch.tensor([prompt])).logits[0]


class Engine:
    """A model, its cache and its adapters, driven by hand. "name 2" is a second request on adapter "name"."""

    def __init__(self, path, paths, prompts, *, max_loras=8, dtype="float32", batch_invariant=False):
        self.model = load_model(path, dtype=dtype, batch_invariant=batch_invariant)
        config = LoRAConfig(max_loras=max_loras, max_cpu_loras=max(32, max_loras), max_lora_rank=8)
        hooks = AdapterHooks(embedding=self.model.embedding, batch_invariant=batch_invariant)
        self.manager = AdapterManager(self.model.linears(), config, dtype, "cpu", hooks)
        self.kv = allocate_kv(self.model.kv_layers, 200, BLOCK_SIZE, getattr(torch, dtype))
        self.prompts = prompts
        self.requests, self.tables, self.computed = {}, {}, dict.fromkeys(prompts, 0)
        blocks = iter(range(200))
        for name, prompt in prompts.items():
            adapter = name.split()[0]
            request = make_request(adapter if adapter in paths else None, paths.get(adapter), name)
            request.tokens, request.num_prompt_tokens = list(prompt), len(prompt)
            self.requests[name] = request
            self.tables[name] = [next(blocks) for _ in range(-(-len(prompt) // BLOCK_SIZE))]
            self.manager.resolve(self.requests[name])

    def admit(self, names):
        for name in names:
            for _ in range(20):
                if (reason := self.manager.admit(self.requests[name])) is None:
                    break
                self.manager.wait(10)
            assert reason is None, name

    def step(self, chunks):
        adapters, head = (
            prepare(
                [
                    handle
                    for name, chunk in chunks.items()
                    for handle in self.requests[name].handles(self.computed[name], len(chunk))
                ]
            )
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

    def run(self, names, chunk_sizes=(1000,)):
        """The prompts of `names` in chunks of (cyclically) these sizes, in one batch; whole logits by name."""
        self.computed |= dict.fromkeys(names, 0)
        parts = {name: [] for name in names}
        step = 0
        while left := [name for name in names if self.computed[name] < len(self.prompts[name])]:
            chunks = {}
            for index, name in enumerate(left):
                start = self.computed[name]
                chunks[name] = self.prompts[name][start : start + chunk_sizes[(step + index) % len(chunk_sizes)]]
            for name, logits in self.step(chunks).items():
                parts[name].append(logits)
            step += 1
        return {name: torch.cat(part) for name, part in parts.items()}

    def close(self):
        for request in self.requests.values():
            self.manager.forget(request)
        self.manager.check_integrity()
        self.manager.close()
