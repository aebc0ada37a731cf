"""What exists: base model, immutable adapter versions, aliases, members and the change log. Knows no torch and no Ray."""
