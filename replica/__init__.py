"""One base model with many adapters: token ids in, token ids out. Knows no Ray, no HTTP and no text."""
