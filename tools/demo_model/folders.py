"""The folders that the stages share, and loading of their models."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from .batches import Encoder
from .config import PROMPT_WEIGHT


class DemoFolders:
    """The folders that the stages share: ``output`` is shipped, ``work`` holds training states and logs."""

    def __init__(self, output: Path, work: Path) -> None:
        self.output = output
        self.work = work

    @property
    def base(self) -> Path:
        """The base model with its tokenizer."""
        return self.output / "base"

    @property
    def draft(self) -> Path:
        """The draft model with the same tokenizer."""
        return self.output / "draft"

    @property
    def eagle3(self) -> Path:
        """The EAGLE-3 head of the base model."""
        return self.output / "eagle3"

    def draft_adapter(self, name: str, method: str) -> Path:
        """The folder of an adapter's draft weights for the drafter of a speculative method."""
        return self.adapter(name) / "draft" / method

    def adapter(self, name: str) -> Path:
        """The folder of an adapter."""
        return self.output / "adapters" / name

    def encoder(self, prompt_weight: float = PROMPT_WEIGHT) -> Encoder:
        """Return the encoder of the trained tokenizer."""
        return Encoder(Tokenizer.from_file(str(self.base / "tokenizer.json")), prompt_weight)


def load_model(folder: Path) -> LlamaForCausalLM:
    """Load a shipped model in float32."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
