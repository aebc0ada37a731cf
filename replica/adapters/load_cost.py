"""What bringing an adapter into a slot takes, by its size: fitted to the loads so far. Pure."""


class LoadCost:
    """Seconds of a load as a fixed part and a part for each byte: the least squares through all loads so far.

    Neither part is below 0, and no more is for the bytes than there would be without a fixed part. Beyond the sizes
    that were seen the fit says little (after small adapters alone, what is fixed looks as if it were the bytes'), so an
    estimate is never more than the longest load took: a large adapter is charged too little once, not too much.
    """

    def __init__(self) -> None:
        self._num_loads = 0
        self._num_bytes = 0
        self._squares = 0
        """Of bytes; integers, so that the spread of equal sizes is exactly 0."""
        self._seconds = 0.0
        self._products = 0.0
        """Of bytes and seconds."""
        self._longest_s = 0.0

    def __repr__(self) -> str:
        return f"LoadCost({self._num_loads} loads, {self._num_bytes} bytes, {self._seconds:.3f} s)"

    def add(self, num_bytes: int, seconds: float) -> None:
        """Note a load that has come into a slot."""
        self._num_loads += 1
        self._num_bytes += num_bytes
        self._squares += num_bytes * num_bytes
        self._seconds += seconds
        self._products += num_bytes * seconds
        self._longest_s = max(self._longest_s, seconds)

    def seconds(self, num_bytes: int) -> float:
        """The estimate for an adapter of that size; 0 before the first load."""
        if not self._num_loads:
            return 0.0
        byte_s = self._byte_s()
        fixed_s = (self._seconds - byte_s * self._num_bytes) / self._num_loads
        return min(fixed_s + byte_s * num_bytes, self._longest_s)

    def _byte_s(self) -> float:
        spread = self._num_loads * self._squares - self._num_bytes**2
        if not spread:
            return 0.0
        slope = (self._num_loads * self._products - self._num_bytes * self._seconds) / spread
        return min(max(slope, 0.0), self._seconds / self._num_bytes)
