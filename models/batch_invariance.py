"""Models that a GPU computes with batch-invariant kernels alone.

Embeddings, plain and quantised products, RMSNorm, gated activations, rotations, attention up to 256 elements a head
and adapters have such kernels there. A CPU has them for every decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..kernels.dispatch import has_triton
from ..platform.core.errors import InvalidRequestError
from .attention import attention_spec, best_backend

if TYPE_CHECKING:
    import torch

    from .config import DecoderConfig

_ON_A_GPU: tuple[tuple[Callable[[DecoderConfig, torch.device], bool], str], ...] = (
    (lambda config, device: not has_triton(), "without Triton"),
    (lambda config, device: config.experts is not None, "for experts"),
    (lambda config, device: config.latent is not None, "for latent attention"),
    (lambda config, device: config.varied is not None, "for layers of several shapes"),
    (lambda config, device: config.block is not None, "for LayerNorm"),
    (lambda config, device: not _has_kernel(config, device), "for attention with such heads"),
)
"""Properties of models without invariant kernels; the first that holds is named."""


def check_batch_invariance(config: DecoderConfig, device: torch.device) -> None:
    """Refuse a `batch_invariant` model whose results for a row may depend on the other rows of a step.

    Raises:
        InvalidRequestError: the model is one; `param` is "batch_invariant".
    """
    if not config.batch_invariant:
        return
    if config.states is not None:
        raise InvalidRequestError(
            f"batch_invariant is not supported with {config.architecture}: its recurrent layers have no such kernels; "
            "leave it out",
            param="batch_invariant",
        )
    if device.type == "cpu":
        return
    for holds, where in _ON_A_GPU:
        if holds(config, device):
            raise InvalidRequestError(
                f"batch_invariant is not supported with {config.architecture} on device {device.type}, which has no "
                f"batch-invariant kernels {where}; leave it out, or use device cpu",
                param="batch_invariant",
            )


def _has_kernel(config: DecoderConfig, device: torch.device) -> bool:
    backend = best_backend(attention_spec(config, device), batch_invariant=True)
    return getattr(backend, "invariant", False)
