"""The tables. Times are seconds since the epoch, UTC: the same in every database, and without time zones to lose."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

MAX_NAME = 64
"""Characters of a tenant's name."""
MAX_CLIENT = 255
MAX_ACTION = 512

tenants = Table(
    "tenants",
    metadata,
    Column("name", String(MAX_NAME), primary_key=True),
    Column("weight", Double, nullable=False, default=1.0),
    Column("limits", JSON, nullable=False, default=dict),  # fields of `Limits` that are set
    Column("max_adapters", Integer, nullable=False, default=0),
    Column("disabled", Boolean, nullable=False, default=False),
    Column("created_at", Double, nullable=False),
    Column("deleted_at", Double),  # the row stays: its name is never given again, and the ledger refers to it
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("tenant", ForeignKey("tenants.name"), nullable=False),
    Column("name", String(MAX_NAME), nullable=False, default=""),
    Column("prefix", String(16), nullable=False),  # of the key itself, for people to recognise it by
    Column("digest", LargeBinary(32), nullable=False, unique=True),  # SHA-256 of the key
    Column("scopes", JSON, nullable=False),
    Column("limits", JSON, nullable=False, default=dict),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    Index(None, "tenant"),
)

adapters = Table(
    "adapters",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("tenant", String(MAX_NAME), nullable=False, default=""),  # "" is shared by all
    Column("name", String(256), nullable=False),
    Column("path", String(4096), nullable=False),
    Column("draft_path", String(4096)),
    Column("pinned", Boolean, nullable=False, default=False),
    Column("created_at", Double, nullable=False),
    Column("digest", String(64)),
    UniqueConstraint("tenant", "name"),
)
"""Adapters loaded over HTTP, so that a server that starts again has them."""

shared_prefixes = Table(
    "shared_prefixes",
    metadata,
    Column("name", String(MAX_NAME), primary_key=True),
    Column("token_ids", JSON, nullable=False),
    Column("created_at", Double, nullable=False),
)
"""Prefixes of prompts whose KV all tenants share, since an admin has said that they are no secret."""

revisions = Table(
    "revisions",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("number", BigInteger, nullable=False, default=0),
)
"""Counted up in the transaction of every change of tenants, keys, adapters or prefixes (name "directory"), so that a
server sees with one small query whether there is anything new."""

audit = Table(
    "audit",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("changed_at", Double, nullable=False),
    Column("via", String(8), nullable=False),  # "http" or "cli"
    Column("key_id", String(32), nullable=False),  # "": the server's own admin key, or the command line
    Column("tenant", String(MAX_NAME), nullable=False),  # the key's
    Column("client", String(MAX_CLIENT), nullable=False),  # an address, or user@machine of the command line
    Column("action", String(MAX_ACTION), nullable=False),
    Index(None, "tenant"),
)
"""Changes and their authors; a row is written in the transaction of the change."""

limit_counts = Table(
    "limit_counts",
    metadata,
    Column("tenant", String(MAX_NAME), primary_key=True),
    Column("counts", JSON, nullable=False),
)
"""Use of the limits of tenants and their keys in the last minutes, for servers that count together."""

usage = Table(
    "usage",
    metadata,
    Column("request_id", String(128), primary_key=True),  # the server's own: a retried write changes nothing
    Column("client_request_id", String(256), nullable=False, default=""),
    Column("tenant", String(MAX_NAME), nullable=False, default=""),
    Column("key_id", String(32), nullable=False, default=""),
    Column("endpoint", String(64), nullable=False),
    Column("model", String(512), nullable=False, default=""),
    Column("adapter", String(512), nullable=False, default=""),
    Column("adapter_digest", String(64), nullable=False, default=""),
    Column("prompt_tokens", Integer, nullable=False, default=0),
    Column("cached_tokens", Integer, nullable=False, default=0),
    Column("output_tokens", Integer, nullable=False, default=0),
    Column("drafted_tokens", Integer, nullable=False, default=0),
    Column("accepted_tokens", Integer, nullable=False, default=0),
    Column("received_at", Double, nullable=False),
    Column("first_token_at", Double),
    Column("finished_at", Double, nullable=False),
    Column("status", String(16), nullable=False),  # "stop", "length", "abort", "error", "lost"
    Column("error_type", String(64), nullable=False, default=""),
    Index(None, "tenant", "finished_at"),
    Index(None, "finished_at"),
)
"""The ledger: one row for each request that was admitted. "lost": its server died before it could say how it ended;
the counts are those of the last checkpoint."""
