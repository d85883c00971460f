"""The tiny target of integration tests in transformers, as references of drafters read it."""

import torch


class ReferenceTarget:
    """Hidden states, embedding and output head of a transformers model."""

    def __init__(self, model) -> None:
        self.model = model
        self.vocab_size, self.num_layers = model.config.vocab_size, model.config.num_hidden_layers
        self.hidden_size = model.config.hidden_size

    @torch.inference_mode()
    def states(self, tokens: list[int]) -> list[torch.Tensor]:
        output = self.model.model(torch.tensor([tokens]), output_hidden_states=True)
        return [state[0] for state in output.hidden_states]

    @property
    def embedding(self) -> torch.Tensor:
        return self.model.model.embed_tokens.weight.detach()

    @property
    def head(self) -> torch.Tensor:
        return self.model.lm_head.weight.detach()
