"""Grouped LoRA kernels and the plain torch reference they are checked against."""
