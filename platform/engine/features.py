"""Features that plug into admission, and into the preparation of a step. The composition root lists them.

The scheduler and the runner know none of them: they see the small protocols here and in `scheduler`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...lora.registry.adapter_stats import AdapterStats
from ...models.batch import AdapterPreparer
from ..core.errors import InvalidRequestError, NotFoundError
from ..core.messages import AdapterInfo
from ..core.model_limits import check_params_tokens, check_token_ids
from ..core.request import Request
from .queue.gates import Gate


class NoAdapters(Gate):
    """Adapters when they are not enabled: requests that name one are refused."""

    def __init__(self, prepare_draft: AdapterPreparer | None = None) -> None:
        """`prepare_draft`: of a target that drafts for itself."""
        self.prepare_draft: AdapterPreparer = prepare_draft or self.prepare

    def resolve(self, request: Request) -> None:
        """Refuse a request that names an adapter."""
        if request.lora is not None:
            raise InvalidRequestError(
                f"adapter {request.lora.name!r} was requested, but LoRA is not enabled (enable_lora)",
                param="lora_request",
            )

    def admit(self, request: Request) -> str | None:
        """Always ready."""
        return None

    def wait(self, timeout: float) -> None:
        """Nothing is loading."""

    def prepare(self, rows: Sequence[tuple[Any, int]], *, always: bool = False) -> None:
        """No row has an adapter."""
        return

    prepare_head = prepare

    def start_reader(self) -> None:
        """Nothing is read."""

    def namespace(self, request: Request) -> bytes:
        """The base model's."""
        return b""

    def vocab_size(self, request: Request) -> int:
        """No adapter has tokens of its own."""
        return 0

    @property
    def catalog(self) -> NoAdapters:
        """The verbs that follow."""
        return self

    def start(self, verb: str, arguments: Mapping[str, Any]) -> None:
        """No verb reads files."""

    def load(self, *args: Any, **options: Any) -> Any:
        """InvalidRequestError: LoRA is not enabled."""
        raise InvalidRequestError("LoRA is not enabled (enable_lora)", param="lora_name")

    register = load

    def unload(self, name: str, *args: Any, **options: Any) -> Any:
        """NotFoundError: there is no adapter."""
        raise NotFoundError(f"adapter {name!r} is not loaded", param="lora_name")

    pin = unpin = unload

    def find(self, name: str) -> AdapterInfo | None:
        """There is none."""
        return None

    def list(self) -> list[AdapterInfo]:
        """None."""
        return []

    def stats(self) -> AdapterStats:
        """None."""
        return AdapterStats([], [], [], [])

    def check_base_may_change(self) -> None:
        """Nothing depends on it."""

    def close(self) -> None:
        """Nothing to stop."""

    def check_integrity(self) -> None:
        """Nothing to check."""


class PrefixNamespaces(Gate):
    """Sets each sequence's prefix-cache namespace at admission: its adapter's content is not known before.

    Listed after the adapters' gate.
    """

    def __init__(self, adapter_namespace: Callable[[Request], bytes], short_context: int | None = None) -> None:
        """Store both. Prompts beyond LongRoPE's short context share KV among themselves alone: their keys use other
        rotary frequencies."""
        self._adapter_namespace = adapter_namespace
        self._short_context = short_context

    def admit(self, request: Request) -> str | None:
        """Set `request.namespace`, and the adapter's digest in `request.text_namespace`; hashes made under another
        namespace are dropped."""
        adapter = self._adapter_namespace(request)
        request.text_namespace = (request.text_namespace[0], adapter)
        if request.sharing is None:
            return None
        activation = b""
        if request.num_base_tokens:
            adapter, activation = activation, adapter
        if self._short_context is not None and request.num_prompt_tokens > self._short_context:
            adapter += b"long"
        namespace = request.sharing + adapter
        if (namespace, activation) != (request.namespace, request.activation):
            request.namespace, request.shared_namespace, request.activation = namespace, adapter, activation
            request.block_hashes.clear()
        return None


class Vocabularies(Gate):
    """Checks the token ids of adapters' requests at admission: the adapter's number of tokens is not known before.
    Listed after the adapters' gate."""

    def __init__(self, size: int, adapter_size: Callable[[Request], int], *, drafts_with_weights: bool) -> None:
        """`size` is the base model's number of tokens, and `adapter_size` returns that of an admitted request's adapter
        or 0. A drafter with weights knows only the base model's tokens."""
        self._size = size
        self._adapter_size = adapter_size
        self._drafts_with_weights = drafts_with_weights

    def admit(self, request: Request) -> str | None:
        """Refuse (InvalidRequestError) ids that the adapter does not have, and grammars if it has more. A drafter
        that does not know the adapter's tokens drafts nothing then."""
        if request.lora is None:
            return None
        size = max(self._size, self._adapter_size(request))
        check_token_ids("prompt", request.tokens[: request.num_prompt_tokens], size)
        if any(token >= size for token in request.eos_token_ids):
            # A tokenizer may name end tokens that the model cannot generate.
            request.eos_token_ids, request.edit_state = frozenset(t for t in request.eos_token_ids if t < size), None
        check_params_tokens(request.params, size)
        if size > self._size and request.params.structured_outputs is not None:
            raise InvalidRequestError(
                f"structured_outputs are not served with adapter {request.lora.name!r}, which adds tokens to the "
                "vocabulary: grammars know the model's tokens",
                param="structured_outputs",
            )
        if size > self._size and self._drafts_with_weights and request.params.max_drafts != 0:
            request.params = request.params.clone(speculative=0)
        return None
