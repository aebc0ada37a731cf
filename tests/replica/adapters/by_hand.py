"""Load threads that do nothing until they are told to."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class Tasks(Executor):
    """Runs what was submitted when it is told to."""

    def __init__(self, tasks: list[Callable[[], None]]) -> None:
        self._tasks = tasks

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._tasks.append(lambda: fn(*args, **kwargs))
        return Future()
