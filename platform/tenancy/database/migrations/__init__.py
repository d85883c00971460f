"""How the tables came to be, one step a file in `versions/`, run by Alembic."""
