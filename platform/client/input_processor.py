"""Prompts and parameters as users give them to requests for the engine.

Everything that needs the vocabulary or the context length is checked here, before the engine hears of a request.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, TypeAlias, TypedDict

from ..core.errors import InvalidRequestError, PromptTooLongError
from ..core.lora_request import LoRA, LoRAMix, LoRARequest
from ..core.messages import MAX_TENANT_WEIGHT, EngineInfo, EngineRequest
from ..core.model_limits import check_params, check_token_ids
from ..core.sampling_params import (
    MAX_SALT_CHARS,
    MAX_SEED,
    SamplingParams,
    check_integer,
    check_number,
    check_text,
    shown,
)
from .chat_template import ChatOptions, render_messages
from .shared_prefixes import SharedPrefixes

Prompt: TypeAlias = str | dict[str, Any] | Sequence[int]
"""A text, {"prompt": text}, {"prompt_token_ids": ids} (both may come together) or token ids."""

FIRST_PIECE_CHARS = 4
"""Characters of a long text that are tokenized at first, for each token that is allowed; then twice as many, and so
on. Texts of people have 2 to 5 a token."""

_LONG_TEXT = 1500
"""Characters above which a prompt is tokenized in a thread, so that the event loop goes on."""
_MANY = 20_000
"""Token ids of a prompt above which they are checked in a thread."""
_FEW = 20
"""Entries of a parameter above which it is checked in a thread."""

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class RequestOptions(TypedDict, total=False):
    """Whose a request is, and what it shares with others."""

    priority: int
    """Lower runs first: under the priority policy, and among a tenant's own under the fair one."""
    tenant: str
    weight: float
    """Of the tenant under the fair policy: with twice the weight it is served twice as much."""
    cache_salt: str
    """Requests share cached prefixes only with the same salt."""


class ParsedPrompt(NamedTuple):
    """A prompt, tokenized and checked."""

    text: str | None
    token_ids: list[int]
    cache_salt: str


class InputProcessor:
    """Makes engine requests for one model."""

    def __init__(self, tokenizer: Any, info: EngineInfo, eos_token_ids: Sequence[int] | None = None) -> None:
        if eos_token_ids is None:
            from ...models.tokenizer import eos_token_ids as read_eos_token_ids

            eos_token_ids = sorted(read_eos_token_ids(info.model, tokenizer))
        self.tokenizer = tokenizer
        # Some models name end tokens that their vocabulary lacks: those can never be said.
        self.eos_token_ids = [token_id for token_id in eos_token_ids if 0 <= token_id < info.vocab_size]
        self.shared_prefixes = SharedPrefixes()
        """What all tenants may share; set by those who run the server, never by a request."""
        self._info = info
        # A request's prompts share them, and so do its checks before and after it is admitted.
        self._tokenized_words = lru_cache(maxsize=8)(self._tokenize_words)

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        lora: LoRA | None = None,
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        cache_salt: str = "",
    ) -> list[EngineRequest]:
        """The sequences of one request: one for each of its `n`. `params` is not changed.

        Raises:
            PromptTooLongError: prompt and tokens asked for exceed `max_model_len`.
            InvalidRequestError: anything else that is wrong, with the field in `param`.
        """
        check_request_id(request_id)
        check_integer("priority", priority, -MAX_SEED - 1)
        check_text("tenant", tenant)
        check_number("weight", weight, 1 / MAX_TENANT_WEIGHT, MAX_TENANT_WEIGHT)
        check_text("cache_salt", cache_salt, MAX_SALT_CHARS)
        if lora is not None and not isinstance(lora, LoRARequest | LoRAMix):
            raise InvalidRequestError(
                f"lora_request must be a LoRARequest or a LoRAMix, got {shown(lora)}", param="lora_request"
            )
        parsed = self.parse_prompt(prompt)
        resolved = self._resolve_params(params if params is not None else SamplingParams(), len(parsed.token_ids))
        cache_salt = cache_salt or parsed.cache_salt
        num_shared = 0 if cache_salt else self.shared_prefixes.match(parsed.token_ids)
        arrival_time = time.monotonic()
        n = resolved.n
        return [
            EngineRequest(
                request_id=request_id if n == 1 else f"{request_id}#{index}",
                prompt_token_ids=parsed.token_ids,
                params=resolved if n == 1 else resolved.sibling(_child_seed(resolved.seed, index)),
                eos_token_ids=self.eos_token_ids,
                lora=lora,
                priority=priority,
                tenant=tenant,
                weight=weight,
                cache_salt=cache_salt,
                num_shared_tokens=num_shared,
                group=None if n == 1 else request_id,
                arrival_time=arrival_time,
            )
            for index in range(n)
        ]

    # --- prompts --------------------------------------------------------------------------------------------------

    def parse_prompt(self, prompt: Prompt) -> ParsedPrompt:
        """Tokenize a prompt (a plain text gets the tokenizer's special tokens) and check its length and ids."""
        text: Any = None
        token_ids: Any = None
        cache_salt: Any = ""
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, dict):
            unknown = [key for key in prompt if key not in _PROMPT_KEYS]
            if unknown:
                raise InvalidRequestError(f"prompt: unsupported key {unknown[0]!r}", param="prompt")
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            cache_salt = prompt.get("cache_salt", "")
        else:
            token_ids = prompt
        if text is None and token_ids is None:
            raise InvalidRequestError("the prompt has neither text nor token ids", param="prompt")
        if not isinstance(text, str | None):
            raise InvalidRequestError("a prompt's text must be a string", param="prompt")
        check_text("cache_salt", cache_salt, MAX_SALT_CHARS)
        ids = (
            self._check_prompt_ids(token_ids)
            if token_ids is not None
            else self.encode(text or "", most=self._info.max_model_len)
        )
        if not ids:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        self._check_num_tokens(len(ids))
        return ParsedPrompt(text, ids, cache_salt)

    def _check_num_tokens(self, num_tokens: int, qualifier: str = "") -> None:
        limit = self._info.max_model_len
        if num_tokens >= limit:
            raise PromptTooLongError(
                f"the prompt has {qualifier}{num_tokens} tokens, which leaves no room for output: "
                f"max_model_len is {limit}",
                param="prompt",
            )

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int, param: str = "prompt") -> list[int]:
        """Token ids of a text. Where its beginning alone has a quarter more than `most`, the rest is not looked at: a
        cut changes the few tokens before it.

        Raises:
            PromptTooLongError: so many tokens; those of a shorter text are for the caller to count.
        """
        try:
            size = most * FIRST_PIECE_CHARS
            while len(text) > size:
                count = len(self.tokenizer.encode(text[:size], add_special_tokens=False))
                if count > most + max(64, most // 4):
                    raise PromptTooLongError(
                        f"the prompt has at least {count} tokens in its first {size} of {len(text)} characters; "
                        f"at most {most} are taken: max_model_len is {self._info.max_model_len}",
                        param=param,
                    )
                size *= 2
            return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except (UnicodeError, TypeError) as error:  # lone surrogates
            raise InvalidRequestError(f"{param}: the text is not valid Unicode: {error}", param=param) from error

    def _check_prompt_ids(self, token_ids: object) -> list[int]:
        if not isinstance(token_ids, Iterable) or isinstance(token_ids, (str, bytes, bytearray, dict)):
            raise InvalidRequestError(f"a prompt must be text or token ids, got {shown(token_ids)}", param="prompt")
        if isinstance(token_ids, Sequence):
            self._check_num_tokens(len(token_ids))
        try:
            # One more than fit, of an array or an iterator that may have any number.
            ids = [operator.index(token_id) for token_id in islice(token_ids, self._info.max_model_len)]
        except TypeError as error:
            raise InvalidRequestError(f"prompt_token_ids must be integers: {error}", param="prompt") from error
        self._check_num_tokens(len(ids), "at least ")
        check_token_ids("prompt", ids, self._info.vocab_size)
        return ids

    # --- chat -----------------------------------------------------------------------------------------------------

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """The token ids of a conversation; the template has written the special tokens itself."""
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
        )
        return self.chat_prompt(messages, options)["prompt_token_ids"]

    def chat_prompt(self, messages: Sequence[dict[str, Any]], options: ChatOptions) -> dict[str, Any]:
        """A conversation as a prompt with both its text and its token ids."""
        text = render_messages(self.tokenizer, messages, options)
        token_ids = self.encode(text, add_special_tokens=False, most=self._info.max_model_len, param="messages")
        return {"prompt": text, "prompt_token_ids": token_ids}

    # --- parameters -----------------------------------------------------------------------------------------------

    def _resolve_params(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """A copy of `params` with the limits filled in, checked against the model."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, got {params!r}", param="sampling_params"
            )
        room = self._info.max_model_len - num_prompt_tokens
        if params.max_tokens is not None and params.max_tokens > room:
            raise PromptTooLongError(
                f"max_tokens is {params.max_tokens} and the prompt has {num_prompt_tokens} tokens, together "
                f"{params.max_tokens + num_prompt_tokens}: max_model_len is {self._info.max_model_len}",
                param="max_tokens",
            )
        if params.stop_strings and not params.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True", param="stop")
        # The copy is checked again, so a min_tokens above the room is refused too.
        resolved = params.clone(
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            bad_words_token_ids=self._bad_words(params),
        )
        check_params(resolved, self._info.vocab_size, self._info.max_logprobs)
        return resolved

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Token ids of the bad words, each as it stands at the start of a text and after a space. One that has no
        tokens is refused by `check_params`."""
        return [list(ids) for ids in self._tokenized_words(tuple(params.bad_words or ()))]

    def _tokenize_words(self, words: tuple[str, ...]) -> list[tuple[int, ...]]:
        sequences: dict[tuple[int, ...], None] = {}  # in order, without repetitions
        for word in words:
            for text in (word, " " + word.lstrip()):
                sequences[tuple(self.tokenizer.encode(text, add_special_tokens=False))] = None
        return list(sequences)


def is_long(prompt: Prompt, params: SamplingParams | None) -> bool:
    """Whether checking the request takes more than about a millisecond."""
    fields = prompt if isinstance(prompt, dict) else {"prompt": prompt} if isinstance(prompt, str) else {}
    text, token_ids = fields.get("prompt"), fields.get("prompt_token_ids") if fields else prompt
    num_chars, num_ids = (len(value) if isinstance(value, Sequence) else 0 for value in (text, token_ids))
    lists = () if params is None else (params.bad_words, params.allowed_token_ids, params.logit_bias)
    return num_chars > _LONG_TEXT or num_ids > _MANY or any(len(value or ()) > _FEW for value in lists)


def check_request_id(request_id: object) -> None:
    """InvalidRequestError unless it is a text that is not empty."""
    check_text("request_id", request_id)
    if not request_id:
        raise InvalidRequestError("request_id must not be empty", param="request_id")


def _child_seed(seed: int | None, index: int) -> int | None:
    """Seed of the `index`-th sequence, kept within 64 bits."""
    if seed is None:
        return None
    return (seed + index + 2**63) % 2**64 - 2**63
