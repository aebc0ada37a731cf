"""The adapter tiers of one replica: node store, host cache and device slots."""
