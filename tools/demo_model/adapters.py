"""The adapters: plain PEFT LoRA on every linear projection, of the base model and, to match, of the draft model."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from .batches import Batch, Encoder
from .config import SEED, AdapterPlan
from .mixture import adapter_document
from .training import LossFunction, Trainer, step_batch, token_loss

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def add_lora(model: LlamaForCausalLM, rank: int, base_name: str) -> PeftModel:
    """Return the model with a fresh LoRA of the given rank; only the LoRA is trainable."""
    torch.manual_seed(SEED + rank)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=PROJECTIONS, bias="none", task_type="CAUSAL_LM")
    wrapped = get_peft_model(model, config)
    config.base_model_name_or_path = base_name
    return wrapped


def export_adapter(model: PeftModel, folder: Path) -> None:
    """Save the adapter as PEFT does, with its weights in bfloat16 and the projections in a stable order."""
    config = model.peft_config["default"]
    assert isinstance(config, LoraConfig)
    config.target_modules = list(PROJECTIONS)
    model.save_pretrained(str(folder))
    (folder / "README.md").unlink(missing_ok=True)
    weights = load_file(folder / "adapter_model.safetensors")
    halves = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    save_file(halves, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_model.safetensors").chmod(0o644)


@dataclass(frozen=True)
class AdapterJob:
    """Training job of one adapter: its name and plan, the name of its base, and its folders."""

    name: str
    plan: AdapterPlan
    base_name: str
    work: Path
    output: Path

    def train(self, model: LlamaForCausalLM, encode: Encoder) -> None:
        """Train the adapter on its own documents and write it to ``output``."""
        wrapped = add_lora(model, self.plan.rank, self.base_name)
        self._run(wrapped, encode, partial(token_loss, wrapped))

    def _run(self, model: PeftModel, encode: Encoder, loss_of: LossFunction) -> None:
        schedule = self.plan.schedule

        def batch_of(step: int) -> Batch:
            return step_batch(lambda rng: adapter_document(rng, self.name), encode, schedule, SEED + 1, step)

        Trainer(model, schedule, self.work).run(batch_of, loss_of, lambda: export_adapter(model, self.output))


def load_adapted(base: Path, adapter: Path) -> PeftModel:
    """Load a model with an adapter in float32."""
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter)
