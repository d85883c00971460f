"""Environment of Alembic's steps: they share the transaction of the connection that `upgrade.py` gives."""

from __future__ import annotations

from alembic import context

attributes = context.config.attributes
# SQLite cannot change a table in place: batch mode, for which autogenerate writes the code, copies it.
context.configure(connection=attributes["connection"], target_metadata=attributes.get("metadata"), render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
