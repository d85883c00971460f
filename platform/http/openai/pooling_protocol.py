"""Request bodies of the routes that pool hidden states: `/v1/embeddings`, `/v1/score`, `/v1/rerank`, `/classify`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...core.errors import InvalidRequestError, invalid
from ...core.pooling import PoolingParams
from ..body.foreign_fields import Unsupported
from .protocol import MAX_PROMPTS, ModelFields, Prompt, Texts, list_prompts


class PooledFields(ModelFields):
    """Fields of the routes that pool hidden states, and of those that classify them."""

    add_special_tokens: bool | None = None


class InputFields(PooledFields):
    """Fields of those of these routes whose texts are prompts."""

    input: Prompt

    @property
    def prompts(self) -> list[str | list[int]]:
        """`input` in its four forms as a list of prompts."""
        return list_prompts(self.input)

    def check(self) -> None:
        """See the base class."""
        check_count("input", len(self.prompts))


class PoolingFields(PooledFields):
    """Fields of the routes that pool hidden states."""

    dimensions: int | None = None
    """Leading dimensions to keep, of models that were trained for that."""
    pooling: str | None = None
    """Ours: "last", "mean" or "cls"; by default as the model's files say."""

    def params(self) -> PoolingParams:
        """Parameters of the pooling; InvalidRequestError names a wrong one."""
        return PoolingParams(pooling=self.pooling, dimensions=self.dimensions)


class EmbeddingRequest(InputFields, PoolingFields):
    """`POST /v1/embeddings`."""

    unsupported: ClassVar = {"messages": Unsupported(([],)), "truncate_prompt_tokens": Unsupported()}
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None


class ClassifyRequest(InputFields):
    """`POST /classify`."""

    unsupported: ClassVar = {"messages": Unsupported(([],)), "truncate_prompt_tokens": Unsupported()} | {
        name: Unsupported((True,)) for name in ("activation", "softmax", "use_activation")
    }


class ScoreRequest(PoolingFields):
    """`POST /v1/score`: one text with each of many, or lists of one length pair by pair. vLLM has three names for
    each side."""

    unsupported: ClassVar = {"truncate_prompt_tokens": Unsupported(), "items": Unsupported(instead="documents")}
    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None
    data_1: str | Texts | None = None
    data_2: str | Texts | None = None

    def side(self, *names: str) -> tuple[str, list[str]]:
        """The name of the field that is given, and its texts.

        Raises:
            InvalidRequestError: none is given, or two that differ.
        """
        given = [(name, value) for name in names if (value := getattr(self, name)) is not None]
        if not given:
            raise InvalidRequestError(f"Missing field: {names[0]!r}", param=names[0])
        name, value = given[0]
        for other, another in given[1:]:
            if another != value:
                raise InvalidRequestError(f"{name} and {other} exclude each other", param=other)
        return name, [value] if isinstance(value, str) else value

    @property
    def second_name(self) -> str:
        """Name of the field of the second texts."""
        return self.side("text_2", "documents", "data_2")[0]

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        """The first texts and the second ones."""
        first, second = self.side("text_1", "queries", "data_1")[1], self.side("text_2", "documents", "data_2")[1]
        return (first * len(second) if len(first) == 1 else first), second

    def check(self) -> None:
        """See the base class."""
        (name, _), second_name = self.side("text_1", "queries", "data_1"), self.second_name
        first, second = self.pairs
        check_count(second_name, len(second))
        if len(first) != len(second):
            raise invalid(name, f"has {len(first)} texts for {len(second)} of {second_name}")


class RerankRequest(PoolingFields):
    """`POST /v1/rerank`."""

    unsupported: ClassVar = {"truncate_prompt_tokens": Unsupported()}
    query: str
    documents: Annotated[list[str | dict[str, Any]], Field(fail_fast=True)]
    """Texts, or objects with a `text`."""
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None
    """Cohere's: a longer document is cut after this number of tokens."""

    @property
    def texts(self) -> list[Any]:
        """Texts of the documents."""
        return [document if isinstance(document, str) else document.get("text") for document in self.documents]

    def check(self) -> None:
        """See the base class."""
        check_count("documents", len(self.documents))
        for index, text in enumerate(self.texts):
            if not isinstance(text, str):
                raise invalid(f"documents[{index}]", "must have a text")
        if self.top_n is not None and self.top_n < 0:
            raise invalid("top_n", f"must be at least 0, got {self.top_n}")
        if self.max_tokens_per_doc is not None and self.max_tokens_per_doc < 1:
            raise invalid("max_tokens_per_doc", f"must be at least 1, got {self.max_tokens_per_doc}")


def check_count(name: str, count: int) -> None:
    """Refuse an empty list, and one of more than `MAX_PROMPTS`."""
    if not 1 <= count <= MAX_PROMPTS:
        raise invalid(name, f"has {count} texts; 1 to {MAX_PROMPTS} are taken")
