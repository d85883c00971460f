"""Counts of limits, for servers that count together."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision: str | None = "0002"


def upgrade() -> None:
    """Make their table, empty."""
    op.create_table(
        "limit_counts",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("counts", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", name="pk_limit_counts"),
    )
