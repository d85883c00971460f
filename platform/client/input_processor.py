"""Prompts and parameters as users give them to requests for the engine.

Everything that needs the vocabulary or the context length is checked here, before the engine gets a request.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, Unpack, cast

from ..core.compat.unsupported_options import check_unsupported_options, reject_unsupported_options
from ..core.compat.vllm_python import GENERATE, PROMPT
from ..core.constraint_check import CHECKER
from ..core.errors import InvalidRequestError, PromptTooLongError, invalid
from ..core.lora_request import LoRA, LoRAMix, LoRARequest
from ..core.messages import MAX_TENANT_WEIGHT, EngineInfo
from ..core.model_limits import MAX_TOKEN_IDS, check_context, check_params, check_token_ids
from ..core.sampling_params import (
    MAX_SALT_CHARS,
    MAX_SEED,
    RequestOutputKind,
    SamplingParams,
    check_integer,
    check_number,
    check_text,
    quote_for_error,
)
from ..core.text import did_you_mean
from .prepared import Defaults, ParsedPrompt, Prepared, RequestOptions
from .prompts import Prompt
from .text.adapter_tokenizers import OwnTokenizer, renamed_token
from .text.chat_template import ChatOptions, render_messages
from .text.no_tokenizer import needed
from .text.shared_prefixes import SharedPrefixes

FIRST_PIECE_CHARS = 4
"""Characters for each allowed token in the first piece of a long text that is tokenized; each further piece is twice as
long. Text of people has 2 to 5 characters a token."""

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
"""`vllm_python.PROMPT` has others, which may be there at values that change nothing."""


def take_options(who: str, options: RequestOptions | dict[str, Any]) -> None:
    """Check the further options of a method; see `reject_unsupported_options`."""
    reject_unsupported_options(who, cast(dict[str, Any], options), GENERATE, RequestOptions.__annotations__)


class InputProcessor:
    """Makes engine requests for one model."""

    def __init__(self, tokenizer: Any, info: EngineInfo, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer`: None if prompts are token ids and answers have no text."""
        self.tokenizer = tokenizer
        # Some models name end tokens that their vocabulary lacks: those can never be said.
        self.eos_token_ids = [token_id for token_id in eos_token_ids if 0 <= token_id < info.vocab_size]
        self.shared_prefixes = SharedPrefixes()
        """Prefixes of prompts that all tenants share; set by the operator, never by a request."""
        self._info = info
        self._root = self  # whose shared prefixes count
        self._renamed: str | None = None  # a token that an adapter's tokenizer has elsewhere
        # A request's prompts share them, and so do its checks before and after it is admitted.
        self._tokenized_words = lru_cache(maxsize=8)(self._tokenize_words)

    def with_tokenizer(self, own: OwnTokenizer) -> InputProcessor:
        """Return a processor for the requests of adapters with this tokenizer."""
        ends = own.eos_token_ids.difference(self.eos_token_ids)
        other = InputProcessor(own.tokenizer, self._info, ())
        other.eos_token_ids = [*self.eos_token_ids, *sorted(ends)]
        other._root = self._root
        other._renamed = renamed_token(self.tokenizer, own.tokenizer)
        return other

    def prepare(
        self,
        request_id: str,
        prompt: Prompt | ParsedPrompt,
        params: SamplingParams | Defaults | None = None,
        *,
        lora: LoRA | None = None,
        default_max_tokens: int | None = None,
        arrival_time: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Prepared:
        """Check a request, so that it can be run.

        Args:
            request_id: follows `check_request_id`.
            prompt: a `ParsedPrompt` is not checked again.
            params: not changed; None is `Defaults()`.
            default_max_tokens: `max_tokens` of `params` without any, or fewer if the context ends first; None: as many
                as fit.
            arrival_time: `Prepared.arrival_time`; by default it is now.

        Raises:
            PromptTooLongError: prompt and tokens requested exceed `max_model_len`.
            InvalidRequestError: anything else that is wrong, with the field in `param`.
        """
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        check_integer("priority", options.get("priority", 0), -MAX_SEED - 1)
        check_text("tenant", options.get("tenant", ""))
        check_number("weight", options.get("weight", 1.0), 1 / MAX_TENANT_WEIGHT, MAX_TENANT_WEIGHT)
        check_text("cache_salt", options.get("cache_salt", ""), MAX_SALT_CHARS)
        if lora is not None and not isinstance(lora, LoRARequest | LoRAMix):
            raise invalid("lora_request", f"must be a LoRARequest or a LoRAMix, got {quote_for_error(lora)}")
        if not isinstance(prompt, ParsedPrompt):
            prompt = self.parse_prompt(prompt, self.num_ids(lora))
        kind = getattr(params, "output_kind", RequestOutputKind.CUMULATIVE)
        if params is None or isinstance(params, Defaults):
            params = SamplingParams(**({} if params is None else params.fields))
            default_max_tokens, params.max_tokens = params.max_tokens, None
        resolved, ignored = self._resolve_params(params, default_max_tokens, prompt, self.num_ids(lora))
        return Prepared(request_id, self, prompt, resolved, lora, options, kind, arrival_time, ignored)

    def num_ids(self, lora: LoRA | None) -> int:
        """Bound of the token ids of a prompt. An adapter may have more tokens than the model; the engine knows how
        many."""
        return self._info.vocab_size if lora is None else MAX_TOKEN_IDS

    def num_shared_tokens(self, token_ids: Sequence[int]) -> int:
        """Number of a prompt's first tokens whose KV all tenants share now."""
        return self._root.shared_prefixes.match(token_ids)

    # --- prompts --------------------------------------------------------------------------------------------------

    def parse_prompt(self, prompt: Prompt, num_ids: int | None = None) -> ParsedPrompt:
        """Tokenize a prompt (a plain text gets the tokenizer's special tokens) and check that ids are below `num_ids`,
        by default those of the model. `prepare` checks the length; of one far above it not all may be read."""
        text: Any = None
        token_ids: Any = None
        cache_salt: Any = ""
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, dict):
            check_unsupported_options(prompt, PROMPT, "prompt")
            unknown = [key for key in prompt if key not in _PROMPT_KEYS and key not in PROMPT]
            if unknown:
                hint = did_you_mean(str(unknown[0]), _PROMPT_KEYS)
                raise InvalidRequestError(
                    f"prompt: unsupported key {quote_for_error(unknown[0])}{hint}", param="prompt"
                )
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            cache_salt = "" if prompt.get("cache_salt") is None else prompt["cache_salt"]
        else:
            token_ids = prompt
        if text is None and token_ids is None:
            raise InvalidRequestError("the prompt has neither text nor token ids", param="prompt")
        if not isinstance(text, str | None):
            raise InvalidRequestError("a prompt's text must be a string", param="prompt")
        check_text("cache_salt", cache_salt, MAX_SALT_CHARS)
        ids = (
            self._check_prompt_ids(token_ids, num_ids or self._info.vocab_size)
            if token_ids is not None
            else self.encode(text or "", most=self._info.max_model_len)
        )
        if not ids:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        return ParsedPrompt(ids, cache_salt, text)

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int, param: str = "prompt") -> list[int]:
        """Token ids of a text. A long text is tokenized in growing pieces, and refused as soon as its prefix has a
        quarter more tokens than `most` (a cut changes only the few tokens before it).

        Raises:
            PromptTooLongError: so many tokens; those of a shorter text are for the caller to count.
            InvalidRequestError: the text cannot be tokenized, or there is no tokenizer.
        """
        needed(self.tokenizer, f"{param}: a text", param)
        try:
            size = most * FIRST_PIECE_CHARS
            while len(text) > size:
                count = len(self.tokenizer.encode(text[:size], add_special_tokens=False))
                if count > most + max(64, most // 4):
                    error = PromptTooLongError(
                        f"This model's maximum context length is {self._info.max_model_len} tokens. However, the first "
                        f"{size} of {len(text)} characters of the {param} have {count} tokens; at most {most} are "
                        f"taken. Please reduce the length of the {param}.",
                        param=param,
                    )
                    error.counts = self._info.max_model_len, count, 1
                    raise error
                size *= 2
            return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except (UnicodeError, TypeError) as error:  # lone surrogates
            raise InvalidRequestError(f"{param}: the text is not valid Unicode: {error}", param=param) from error
        except PromptTooLongError:
            raise
        except Exception as error:  # an adapter's tokenizer may lack the token for what it does not know
            raise InvalidRequestError(f"{param}: the text cannot be tokenized: {error}", param=param) from error

    def encode_cut(self, text: str, most: int, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a text, cut so that there are at most `most` with the special tokens around them. Errors: see
        `encode`."""

        def tokens(special: bool) -> list[int]:
            return self.encode(text[:size], add_special_tokens=special, most=size)

        size = most * FIRST_PIECE_CHARS
        bare = tokens(False)
        while len(text) > size and len(bare) < most + 64:  # a cut changes only the few tokens before it
            size *= 2
            bare = tokens(False)
        whole = tokens(True) if add_special_tokens else bare
        if len(whole) <= most:
            return tuple(whole)
        head = next((i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare), 0)
        tail = whole[head + len(bare) :]
        return (*whole[:head], *bare[: max(0, most - head - len(tail))], *tail)[:most]

    def _check_prompt_ids(self, token_ids: object, num_ids: int) -> list[int]:
        if not isinstance(token_ids, Iterable) or isinstance(token_ids, (str, bytes, bytearray, dict)):
            raise InvalidRequestError(
                f"a prompt must be text or token ids, got {quote_for_error(token_ids)}", param="prompt"
            )
        if not isinstance(token_ids, Sequence):  # of an iterator, which may have no end, one more than fit
            token_ids = islice(token_ids, self._info.max_model_len + 1)
        try:
            ids = [operator.index(token_id) for token_id in token_ids]
        except TypeError as error:
            raise InvalidRequestError(f"prompt_token_ids must be integers: {error}", param="prompt") from error
        check_token_ids("prompt", ids, num_ids)
        return ids

    # --- chat -----------------------------------------------------------------------------------------------------

    def chat_prompt(self, messages: Sequence[dict[str, Any]], options: ChatOptions) -> dict[str, Any]:
        """A conversation as a prompt with both its text and its token ids."""
        text = render_messages(needed(self.tokenizer, "messages: a chat", "messages"), messages, options)
        token_ids = self.encode(text, add_special_tokens=False, most=self._info.max_model_len, param="messages")
        return {"prompt": text, "prompt_token_ids": token_ids}

    # --- parameters -----------------------------------------------------------------------------------------------

    def _resolve_params(
        self, params: SamplingParams, default_max_tokens: int | None, prompt: ParsedPrompt, num_ids: int
    ) -> tuple[SamplingParams, list[str]]:
        """A copy of `params` with the limits filled in, checked against the model, and the paths of keywords of its
        schema that do not hold."""
        if not isinstance(params, SamplingParams):
            raise invalid("sampling_params", f"must be SamplingParams, got {params!r}")
        limit, length = self._info.max_model_len, len(prompt.token_ids)
        if params.max_tokens is None and default_max_tokens is not None:
            params = params.clone(max_tokens=max(1, min(default_max_tokens, limit - length)))
        room = check_context(
            limit,
            length,
            1 if params.max_tokens is None else params.max_tokens,
            only_scores=params.only_scores,
            prompt=prompt.field,
        )
        if self.tokenizer is None:
            params = _without_text(params)
        if params.stop_strings and not params.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True", param="stop")
        start, end = self._thinking_marks(params)
        # The copy is checked again, so a min_tokens above the room is refused too.
        resolved = params.clone(
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            bad_words_token_ids=self._bad_words(params),
            thinking_start_token_ids=start,
            thinking_end_token_ids=end,
            **{
                name: self._info.vocab_size
                for name in ("logprobs", "prompt_logprobs")
                if getattr(params, name) == -1 and self._info.max_logprobs >= self._info.vocab_size
            },
        )
        ignored: list[str] = []
        if resolved.structured_outputs is not None:
            if self._renamed is not None:
                source = resolved.structured_outputs.source
                raise InvalidRequestError(
                    f"{source}: structured outputs are not served with an adapter whose tokenizer.json gives tokens of "
                    f"the model other ids, such as {quote_for_error(self._renamed)}: grammars know the model's tokens",
                    param=source,
                )
            ignored = CHECKER.check(resolved.structured_outputs)
        check_params(resolved, self._info.vocab_size, self._info.max_logprobs, num_ids, self._info.num_labels)
        return resolved, ignored

    def _thinking_marks(self, params: SamplingParams) -> tuple[list[int] | None, list[int] | None]:
        """Tokens that begin and end the reasoning; without any, of a request that bounds it, <think> and </think>."""
        start, end = params.thinking_start_token_ids, params.thinking_end_token_ids
        if params.thinking_token_budget is None or end is not None or self.tokenizer is None:
            return start, end
        marks = [list(self.tokenizer.encode(mark, add_special_tokens=False)) for mark in ("<think>", "</think>")]
        if any(len(mark) != 1 for mark in marks):  # as text they could be written in several ways
            return start, end
        return start or marks[0], marks[1]

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Token ids of the bad words, each as it is tokenized at the start of a text and after a space. One that has no
        tokens is refused by `check_params`."""
        return [list(ids) for ids in self._tokenized_words(tuple(params.bad_words or ()))]

    def _tokenize_words(self, words: tuple[str, ...]) -> list[tuple[int, ...]]:
        sequences: dict[tuple[int, ...], None] = {}  # in order, without repetitions
        for word in words:
            for text in (word, " " + word.lstrip()):
                sequences[tuple(self.tokenizer.encode(text, add_special_tokens=False))] = None
        return list(sequences)


def _without_text(params: SamplingParams) -> SamplingParams:
    """A copy of `params` for an engine without a tokenizer.

    Raises:
        InvalidRequestError: a parameter needs the tokenizer.
    """
    constraint = params.structured_outputs
    for asked, param in (
        (params.stop_strings, "stop"),
        (params.bad_words, "bad_words"),
        (constraint, "" if constraint is None else constraint.source),
    ):
        if asked:
            needed(None, param, param)
    return params.clone(detokenize=False)


def check_request_id(request_id: object) -> None:
    """Raise InvalidRequestError unless the id is a text that is not empty."""
    check_text("request_id", request_id)
    if not request_id:
        raise invalid("request_id", "must not be empty")
