"""The digest of a loaded adapter's files; the audit by tenant."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision: str | None = "0001"


def upgrade() -> None:
    """Adapters that were loaded before have none: their files are taken as they are."""
    op.add_column("adapters", sa.Column("digest", sa.String(length=64), nullable=True))
    op.create_index("ix_audit_tenant", "audit", ["tenant"])
