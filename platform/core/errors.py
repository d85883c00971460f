"""Typed errors. Each has the field that it is about, and can be sent between processes.

`type` is the name clients see in the HTTP body (`error.type`), `status` the HTTP status that fits it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as plain data, for messages between processes."""

    type: str
    message: str
    param: str | None = None


class OutriderError(Exception):
    """Base class of the errors that users see."""

    type: ClassVar[str] = "InternalServerError"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def info(self) -> ErrorInfo:
        """The error as plain data. Its text can be encoded: lone surrogates, which file names may contain, are
        escaped."""
        message = self.message.encode(errors="backslashreplace").decode()
        return ErrorInfo(type(self).type, message, self.param)


class InvalidRequestError(OutriderError, ValueError):
    """A request or an option is wrong; `param` names the field."""

    type = "BadRequestError"
    status = 400


def invalid(param: str, problem: str) -> InvalidRequestError:
    """The error for a field: its message is the field's name and then the problem, such as "must not be empty"."""
    return InvalidRequestError(f"{param} {problem}", param=param)


class PromptTooLongError(InvalidRequestError):
    """Prompt plus the tokens requested do not fit `max_model_len`."""

    type = "ContextLengthExceeded"
    counts: tuple[int, int, int] | None = None
    """Limit, and tokens of prompt and completion, for APIs with a message of their own. Of a text far too long only
    the first part is counted."""

    @classmethod
    def of(
        cls, limit: int, num_prompt: int, max_tokens: int = 1, *, param: str, prompt: str = "prompt", of: str = ""
    ) -> PromptTooLongError:
        """Make the error with OpenAI's message, which makes gateways shorten a conversation or choose another model.

        Args:
            prompt: what the client calls it, "messages" in a chat.
            of: whose limit it is, if not the model's alone.
        """
        requested = num_prompt + max_tokens
        error = cls(
            f"This model's maximum context length is {limit} tokens{of}. However, you requested {requested} tokens "
            f"({num_prompt} in the {prompt}, {max_tokens} in the completion). Please reduce the length of the "
            f"{prompt} or completion{'' if param == prompt else f' ({param})'}.",
            param=param,
        )
        error.counts = limit, num_prompt, max_tokens
        return error


class InvalidUserInputError(InvalidRequestError):
    """An admin call contradicts the present state, such as a duplicate adapter name."""

    type = "InvalidUserInput"


class AdapterError(InvalidRequestError):
    """An adapter cannot be served: missing or corrupt files, wrong shapes, rank above the limit, another base."""

    type = "InvalidAdapter"


class NotFoundError(OutriderError, LookupError):
    """The named model or adapter does not exist."""

    type = "NotFoundError"
    status = 404


class AdapterReplacedError(OutriderError):
    """Another version of the adapter was loaded, and the load ended the requests of the old one; a retry runs on the
    new one."""

    type = "AdapterReplaced"
    status = 409


class RequestAbortedError(OutriderError):
    """The request was aborted before it had a result, as by a pause; a retry may have one."""

    type = "RequestAborted"
    status = 503


class AuthenticationError(OutriderError):
    """The API key is missing or wrong."""

    type = "AuthenticationError"
    status = 401


class PermissionDeniedError(OutriderError):
    """The key or credentials that were sent do not allow this call."""

    type = "PermissionDeniedError"
    status = 403


class AdapterSourceError(OutriderError):
    """The store that an adapter comes from cannot be reached, or failed; a later retry may succeed."""

    type = "AdapterSourceError"
    status = 503


class RateLimitError(OutriderError):
    """A tenant or a key has reached a limit, which `param` names."""

    type = "RateLimitError"
    status = 429

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after: float = 1.0,
        code: str = "rate_limit_exceeded",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            retry_after: seconds after which the same request may be admitted.
            code: as OpenAI's clients know it; "insufficient_quota" if waiting for seconds does not help.
            headers: of the HTTP answer, with the state of the limits.
        """
        super().__init__(message, param=param)
        self.retry_after = retry_after
        self.code = code
        self.headers = dict(headers or {})


class OverloadedError(OutriderError):
    """The queue is full; retry later."""

    type = "OverloadedError"
    status = 503


class ConstraintCheckError(OutriderError):
    """The process that checks constraints on answers has ended; a retry starts another one."""

    type = "ServiceUnavailableError"
    status = 503


class EngineDeadError(OutriderError):
    """The engine process died with this request in flight; it is being restarted."""

    type = "EngineDeadError"
    status = 503


class AsleepError(OutriderError):
    """The engine sleeps, and takes no requests until `wake_up`."""

    type = "EngineAsleep"
    status = 503


class ShuttingDownError(OutriderError):
    """The server is draining and takes no new requests."""

    type = "ShuttingDownError"
    status = 503


class UnsupportedModelError(OutriderError, ValueError):
    """The model's architecture or configuration is not one that Outrider serves."""

    type = "UnsupportedModel"
    status = 400


_BY_TYPE: dict[str, type[OutriderError]] = {
    cls.type: cls for cls in [*globals().values()] if isinstance(cls, type) and issubclass(cls, OutriderError)
}


def error_from_info(info: ErrorInfo) -> OutriderError:
    """Rebuild the typed error that `info` describes; an unknown type becomes a plain OutriderError."""
    return _BY_TYPE.get(info.type, OutriderError)(info.message, param=info.param)
