"""One module a tenant: the templates that its data is generated from. They know nothing of models or files."""
