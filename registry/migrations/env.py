"""Runs the steps on the connection that `registry.schema` hands over, inside its transaction."""

from alembic import context

from registry.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, transactional_ddl=True)
context.run_migrations()
