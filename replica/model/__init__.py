"""The base model: loading, paged attention and the LoRA-aware projections."""
