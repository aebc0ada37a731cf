"""Ray: deployments, the registry actor, the Serve faces of the plain classes, configuration and the command line."""
