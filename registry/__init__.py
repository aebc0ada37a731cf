"""What exists: base model, immutable adapter versions, aliases, members and the change log. No torch, no Ray."""
