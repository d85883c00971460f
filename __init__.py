"""Outrider: speculative decoding and LoRA serving that compose.

The public names below are imported on first use, so `import outrider` itself loads neither torch nor the web stack.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .platform.client.async_llm import AsyncLLM
    from .platform.client.input_processor import TextPrompt, TokensPrompt
    from .platform.client.llm import LLM
    from .platform.core.config import EngineArgs
    from .platform.core.lora_request import LoRAMix, LoRARequest
    from .platform.core.outputs import CompletionOutput, RequestOutput
    from .platform.core.sampling_params import SamplingParams

__version__ = "0.1.0"

# Weights of a CPU model are read from end to end in every step, a gigabyte in tens of milliseconds: with pages of 4 KB
# a quarter of that time goes to looking up addresses. torch looks at this when it makes the first tensor; whoever sets
# it to 0 keeps small pages.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineArgs",
    "LoRAMix",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_MODULE_OF = {
    "LLM": ".platform.client.llm",
    "AsyncLLM": ".platform.client.async_llm",
    "EngineArgs": ".platform.core.config",
    "CompletionOutput": ".platform.core.outputs",
    "LoRAMix": ".platform.core.lora_request",
    "LoRARequest": ".platform.core.lora_request",
    "RequestOutput": ".platform.core.outputs",
    "SamplingParams": ".platform.core.sampling_params",
    "TextPrompt": ".platform.client.input_processor",
    "TokensPrompt": ".platform.client.input_processor",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name], __name__), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
