"""The decoder layers behind the compiler: one compiled function for all layers of a kind, any number of rows."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)


def compile_layers(layers: Sequence[nn.Module], backend: str = "inductor") -> None:
    """Replace each layer's forward by a function compiled once for its class; it is compiled at its first call.

    The number of rows is dynamic, except that one row would be compiled apart: callers keep it above one.
    """
    functions: dict[type, Callable[..., Any]] = {}
    for layer in layers:
        kind = type(layer)
        if kind not in functions:
            functions[kind] = torch.compile(kind.forward, dynamic=True, fullgraph=True, backend=backend)
        layer.forward = partial(functions[kind], layer)


def restore_layers(layers: Sequence[nn.Module]) -> None:
    """Give the layers their own forward back."""
    for layer in layers:
        layer.__dict__.pop("forward", None)


def try_compiled(layers: Sequence[nn.Module], warm_up: Callable[[], None]) -> bool:
    """Run `warm_up`, which calls the compiled layers; when they do not compile, say so and go on without."""
    try:
        warm_up()
    except Exception as error:
        if not _is_compiler_error(error):
            raise
        logger.warning("the layers do not compile (%s: %s); they run eagerly", type(error).__name__, error)
        restore_layers(layers)
        warm_up()
        return False
    return True


def _is_compiler_error(error: Exception) -> bool:
    return isinstance(error, torch._dynamo.exc.TorchDynamoException) or "inductor" in type(error).__module__
