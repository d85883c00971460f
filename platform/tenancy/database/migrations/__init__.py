"""Migrations of the tables, one step a file in `versions/`, run by Alembic."""
