"""A tiny target in transformers, and draft heads for it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ...eagle_heads import EPS, Head

VOCAB, LAYERS, HIDDEN = 97, 5, 32


class Target:
    """The target, as transformers has it and on disk."""

    vocab_size, num_layers, hidden_size = VOCAB, LAYERS, HIDDEN

    def __init__(self, path: Path) -> None:
        torch.manual_seed(11)
        config = LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCAB,
            max_position_embeddings=512,
            initializer_range=0.3,
            rms_norm_eps=EPS,
            tie_word_embeddings=False,
        )
        self.path = path
        self.model = LlamaForCausalLM(config).float().eval()
        self.model.save_pretrained(path)

    @torch.inference_mode()
    def states(self, tokens: list[int]) -> list[Tensor]:
        """[T, H] entering each layer, and last the one after the final norm."""
        output = self.model.model(torch.tensor([tokens]), output_hidden_states=True)
        return [state[0] for state in output.hidden_states]

    @property
    def embedding(self) -> Tensor:
        return self.model.model.embed_tokens.weight.detach()

    @property
    def head(self) -> Tensor:
        return self.model.lm_head.weight.detach()


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Target:
    return Target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def decoder(target):
    """The target as our decoder, in float32."""
    from outrider.models.checkpoint.loader import load_model

    return load_model(target.path, dtype="float32")


@pytest.fixture(scope="session")
def make_head(target):
    """make_head(method, **options) -> Head"""
    return lambda method, **options: Head(target, method, **options)


@pytest.fixture
def load_head(decoder, tmp_path):
    """load_head(path or Head, method, **fields) -> the drafter, through the factory; the plain one unless adaptive."""
    from outrider.platform.core.speculative_config import parse_speculative
    from outrider.spec_decode.drafters.factory import DrafterContext, make_drafter

    def load(head, method=None, *, load_format="auto", budget=2048, max_model_len=256, **fields):
        path = head.save(tmp_path / "head") if isinstance(head, Head) else head
        config = {"method": method or head.method, "model": str(path), "adaptive": False, **fields}
        context = DrafterContext(
            target=decoder,
            device="cpu",
            dtype="float32",
            load_format=load_format,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
        )
        return make_drafter(parse_speculative(config), context)

    return load
