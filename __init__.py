"""Outrider: speculative decoding and LoRA serving that compose.

The public names below are imported on first use, so `import outrider` itself loads neither torch nor the web stack.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .platform.core.compat.import_paths import add_paths

if TYPE_CHECKING:
    from .platform.client.async_llm import AsyncLLM
    from .platform.client.async_llm import AsyncLLM as AsyncLLMEngine
    from .platform.client.llm import LLM
    from .platform.client.llm_engine import LLMEngine
    from .platform.client.prompts import TextPrompt, TokensPrompt
    from .platform.core.beam_search import BeamSearchParams
    from .platform.core.config import EngineArgs
    from .platform.core.config import EngineArgs as AsyncEngineArgs
    from .platform.core.errors import (
        AdapterError,
        AdapterReplacedError,
        AdapterSourceError,
        AsleepError,
        AuthenticationError,
        ConstraintCheckError,
        EngineDeadError,
        InvalidRequestError,
        InvalidUserInputError,
        NotFoundError,
        OutriderError,
        OverloadedError,
        PermissionDeniedError,
        PromptTooLongError,
        RateLimitError,
        RequestAbortedError,
        ShuttingDownError,
        UnsupportedModelError,
    )
    from .platform.core.lora_request import LoRAMix, LoRARequest, TensorLoRARequest
    from .platform.core.messages import AdapterInfo, EngineInfo, EngineStats
    from .platform.core.outputs import CompletionOutput, RequestOutput
    from .platform.core.pooling import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingParams,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from .platform.core.repetition import RepetitionDetectionParams
    from .platform.core.sampling_params import RequestOutputKind, SamplingParams
    from .platform.core.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

# Weights of a CPU model are read from end to end in every step, a gigabyte in tens of milliseconds: with pages of 4 KB
# a quarter of that time goes to looking up addresses. torch looks at this when it makes the first tensor; with
# 0 pages stay small.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

_NAMES_OF = {
    ".platform.client.async_llm": "AsyncLLM",
    ".platform.client.prompts": "TextPrompt TokensPrompt",
    ".platform.client.llm": "LLM",
    ".platform.client.llm_engine": "LLMEngine",
    ".platform.core.beam_search": "BeamSearchParams",
    ".platform.core.config": "EngineArgs",
    ".platform.core.errors": """
        AdapterError AdapterReplacedError AdapterSourceError AsleepError AuthenticationError ConstraintCheckError
        EngineDeadError InvalidRequestError InvalidUserInputError NotFoundError OutriderError OverloadedError
        PermissionDeniedError PromptTooLongError RateLimitError RequestAbortedError ShuttingDownError
        UnsupportedModelError
    """,
    ".platform.core.lora_request": "LoRAMix LoRARequest TensorLoRARequest",
    ".platform.core.messages": "AdapterInfo EngineInfo EngineStats",
    ".platform.core.outputs": "CompletionOutput RequestOutput",
    ".platform.core.pooling": """
        ClassificationRequestOutput EmbeddingRequestOutput PoolingParams PoolingRequestOutput ScoringRequestOutput
    """,
    ".platform.core.repetition": "RepetitionDetectionParams",
    ".platform.core.sampling_params": "RequestOutputKind SamplingParams",
    ".platform.core.structured_outputs": "StructuredOutputsParams",
}
_ALIASES = {"AsyncEngineArgs": "EngineArgs", "AsyncLLMEngine": "AsyncLLM"}
"""vLLM's second names of one class."""
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}

__all__ = [
    "LLM",
    "AdapterError",
    "AdapterInfo",
    "AdapterReplacedError",
    "AdapterSourceError",
    "AsleepError",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "AuthenticationError",
    "BeamSearchParams",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConstraintCheckError",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineDeadError",
    "EngineInfo",
    "EngineStats",
    "InvalidRequestError",
    "InvalidUserInputError",
    "LLMEngine",
    "LoRAMix",
    "LoRARequest",
    "NotFoundError",
    "OutriderError",
    "OverloadedError",
    "PermissionDeniedError",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptTooLongError",
    "RateLimitError",
    "RepetitionDetectionParams",
    "RequestAbortedError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "ShuttingDownError",
    "StructuredOutputsParams",
    "TensorLoRARequest",
    "TextPrompt",
    "TokensPrompt",
    "UnsupportedModelError",
    "__version__",
]


add_paths(__name__)


def __getattr__(name: str) -> Any:
    known = _ALIASES.get(name, name)
    if known not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[known], __name__), known)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
