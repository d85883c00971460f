"""Tenants, keys, loaded adapters, shared prefixes, the audit and the ledger."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision: str | None = None


def upgrade() -> None:
    """Make the tables in an empty database."""
    _make_tenants()
    _make_prefixes_and_adapters()
    _make_audit()
    _make_usage()
    revisions = sa.table("revisions", sa.column("name", sa.String), sa.column("number", sa.BigInteger))
    op.execute(revisions.insert().values(name="directory", number=0))


def _make_tenants() -> None:
    op.create_table(
        "tenants",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("max_adapters", sa.Integer(), nullable=False),
        sa.Column("disabled", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("deleted_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("name", name="pk_tenants"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("prefix", sa.String(length=16), nullable=False),
        sa.Column("digest", sa.LargeBinary(length=32), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name="fk_api_keys_tenant"),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.UniqueConstraint("digest", name="uq_api_keys_digest"),
    )
    op.create_index("ix_api_keys_tenant", "api_keys", ["tenant"])


def _make_prefixes_and_adapters() -> None:
    op.create_table(
        "adapters",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("path", sa.String(length=4096), nullable=False),
        sa.Column("draft_path", sa.String(length=4096), nullable=True),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_adapters"),
        sa.UniqueConstraint("tenant", "name", name="uq_adapters_tenant_name"),
    )
    op.create_table(
        "shared_prefixes",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("token_ids", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_shared_prefixes"),
    )
    op.create_table(
        "revisions",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_revisions"),
    )


def _make_audit() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.Column("via", sa.String(length=8), nullable=False),
        sa.Column("key_id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("client", sa.String(length=255), nullable=False),
        sa.Column("action", sa.String(length=512), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )


def _make_usage() -> None:
    op.create_table(
        "usage",
        sa.Column("request_id", sa.String(length=128), nullable=False),
        sa.Column("client_request_id", sa.String(length=256), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=32), nullable=False),
        sa.Column("endpoint", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=512), nullable=False),
        sa.Column("adapter", sa.String(length=512), nullable=False),
        sa.Column("adapter_digest", sa.String(length=64), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("output_tokens", sa.Integer(), nullable=False),
        sa.Column("drafted_tokens", sa.Integer(), nullable=False),
        sa.Column("accepted_tokens", sa.Integer(), nullable=False),
        sa.Column("received_at", sa.Double(), nullable=False),
        sa.Column("first_token_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("error_type", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name="pk_usage"),
    )
    op.create_index("ix_usage_finished_at", "usage", ["finished_at"])
    op.create_index("ix_usage_tenant_finished_at", "usage", ["tenant", "finished_at"])
