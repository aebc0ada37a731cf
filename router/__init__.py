"""The gateway: HTTP, text to tokens and back, and which replica serves a request. Knows no torch and no Ray."""
