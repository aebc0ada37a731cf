"""The steps from one schema of the registry's database to the next, for Alembic."""
