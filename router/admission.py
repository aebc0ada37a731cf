"""How many prompts may be in flight through this gateway at once. Fairness between tenants is the replicas' work."""

from collections.abc import Iterator
from contextlib import contextmanager

from router.errors import TooManyRequests


class Admission:
    """Counts prompts in flight against one limit."""

    def __init__(self, max_concurrent: int) -> None:
        self._max_concurrent = max_concurrent
        self._num_in_flight = 0

    def __repr__(self) -> str:
        return f"Admission({self._num_in_flight} of {self._max_concurrent} in flight)"

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    @contextmanager
    def admit(self, num_prompts: int) -> Iterator[None]:
        """Hold places for `num_prompts` prompts; raises TooManyRequests when they do not fit."""
        if self._num_in_flight + num_prompts > self._max_concurrent:
            raise TooManyRequests(
                f"{self._num_in_flight} prompts are in flight, the limit is {self._max_concurrent}; retry later"
            )
        self._num_in_flight += num_prompts
        try:
            yield
        finally:
            self._num_in_flight -= num_prompts
