"""The JSON of `/admin/v1`. Times are seconds since 1970, in UTC."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field

from ...tenancy.accounts.principal import MAX_ALLOWED_ADAPTERS, MAX_LIMIT, Period, Scope
from ...tenancy.database.schema import MAX_NAME
from ...tenancy.database.store import MAX_ADAPTERS, MAX_PREFIX_TOKENS, MAX_TOKEN_ID, MAX_WEIGHT
from ...tenancy.times import MAX_TIME
from ..body.lenient import RequestModel

T = TypeVar("T")
Count = Annotated[int, Field(ge=1, le=MAX_LIMIT)]
CountOrZero = Annotated[int, Field(ge=0, le=MAX_LIMIT)]
Slug = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Weight = Annotated[float, Field(ge=1 / MAX_WEIGHT, le=MAX_WEIGHT)]
MaxAdapters = Annotated[int, Field(ge=0, le=MAX_ADAPTERS)]
AdapterNames = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(max_length=MAX_ALLOWED_ADAPTERS, fail_fast=True),
    BeforeValidator(lambda names: list(names) if isinstance(names, tuple) else names),  # as our own records have it
]
KeyName = Annotated[str, Field(max_length=MAX_NAME)]
ExpiresAt = Annotated[float, Field(ge=0, le=MAX_TIME)]


class ListOf(BaseModel, Generic[T]):
    """A list; the order is the route's."""

    object: Literal["list"] = "list"
    data: list[T]


class ErrorDetail(BaseModel):
    """Description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error's body."""

    error: ErrorDetail


class LimitFields(RequestModel):
    """Bounds of a tenant or key; null: no bound. If both have one, both hold."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = Field(default=None, description="Prompt and output tokens")
    max_concurrent_requests: Count | None = None
    max_queued_requests: CountOrZero | None = Field(
        default=None, description="That wait for one of the concurrent slots"
    )
    max_context_tokens: Count | None = Field(default=None, description="Prompt and max_tokens of one request")
    max_output_tokens: Count | None = Field(default=None, description="max_tokens of one request")
    allowed_adapters: AdapterNames | None = Field(default=None, description="In addition to the base model")
    token_budget: CountOrZero | None = Field(default=None, description="Tokens a period")
    budget_period: Period | None = Field(default=None, description="In UTC; null: a month")


class TenantCreate(RequestModel):
    """A new tenant."""

    name: Slug
    weight: Weight = Field(default=1.0, description="Its share under the fair scheduling policy")
    limits: LimitFields = LimitFields()
    max_adapters: MaxAdapters = Field(default=0, description="Adapters that it may load itself")


class TenantUpdate(RequestModel):
    """Fields to change; the others stay, also inside `limits`, in which null takes a bound away."""

    weight: Weight = 1.0
    limits: LimitFields = LimitFields()
    max_adapters: MaxAdapters = 0
    disabled: bool = Field(default=False, description="Its keys are refused as long as this is true")


class TenantView(BaseModel):
    """A tenant."""

    name: str
    weight: float
    limits: LimitFields
    max_adapters: int
    disabled: bool
    created_at: float


class KeyCreate(RequestModel):
    """A new key."""

    tenant: str
    name: KeyName = Field(default="", description="For people")
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=2)] = Field(default=["inference"])
    limits: LimitFields = LimitFields()
    expires_at: ExpiresAt | None = None


class KeyUpdate(RequestModel):
    """Fields to change; the others stay, also inside `limits`."""

    name: KeyName = ""
    limits: LimitFields = LimitFields()
    expires_at: ExpiresAt | None = None


class KeyView(BaseModel):
    """A key, without the key."""

    id: str
    tenant: str
    name: str
    prefix: str = Field(description="The key's first characters")
    scopes: list[Scope]
    limits: LimitFields
    state: Literal["active", "expired", "revoked"]
    created_at: float
    expires_at: float | None
    revoked_at: float | None


class NewKeyView(KeyView):
    """A key that was just made."""

    key: str = Field(description="The key itself. It is shown here only, and stored nowhere")


class Deleted(BaseModel):
    """Confirmation that something was deleted."""

    name: str
    deleted: Literal[True] = True


class PrefixCreate(RequestModel):
    """Prompt prefix whose KV all tenants share from now on: given as one of text, messages and token ids."""

    name: Slug
    text: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="As in `prompt` of /v1/completions"
    )
    messages: Annotated[list[Any], Field(min_length=1)] | None = Field(
        default=None,
        description="As in /v1/chat/completions, rendered by the chat template without a generation prompt",
    )
    token_ids: (
        Annotated[
            list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]],
            Field(min_length=1, max_length=MAX_PREFIX_TOKENS, fail_fast=True),
        ]
        | None
    ) = None


class PrefixView(BaseModel):
    """A shared prefix."""

    name: str
    num_tokens: int
    created_at: float


class UsageRow(BaseModel):
    """A sum over requests. It has those of the first nine fields that it was grouped by."""

    tenant: str | None = None
    key: str | None = Field(default=None, description="A key's id; empty for the server's own keys")
    adapter: str | None = Field(default=None, description="Empty for the base model")
    model: str | None = None
    endpoint: str | None = None
    status: str | None = None
    hour: str | None = None
    day: str | None = None
    month: str | None = None
    requests: int
    prompt_tokens: int
    cached_tokens: int = Field(description="Prompt tokens that the prefix cache had")
    output_tokens: int
    drafted_tokens: int
    accepted_tokens: int


class AuditRow(BaseModel):
    """A change by an administrator."""

    id: int
    changed_at: float
    via: Literal["http", "cli"]
    key_id: str = Field(description="Empty for the server's own admin keys, and for the command line")
    tenant: str = Field(description="The key's")
    client: str = Field(description="Its address, or user@machine of the command line")
    action: str
