"""What one simulated replica can do, in measured times. The defaults are figures of benchmarks/README.md (one H200)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """One replica: how many adapters and requests it holds, and how long its work takes.

    A decode step takes `step_s`, and with adapters in the batch `lora_step_s` plus `adapter_step_s` for each distinct
    one. A load into a slot takes `swap_s`, after `node_load_s` when the adapter is not in host memory either; loads of
    one replica follow each other on the bus.
    """

    num_slots: int = 64
    num_rows: int = 64
    """Requests that run at once (`scheduler.max_num_seqs`)."""
    num_host_adapters: int = 400
    """Adapters that `adapters.host_bytes` holds; beyond them a load reads the node's disk."""
    step_s: float = 0.0059
    lora_step_s: float = 0.0003
    adapter_step_s: float = 0.00003
    prefill_token_s: float = 0.00004
    swap_s: float = 0.003
    """83.9 MB over PCIe in 1.7 ms, and the hops between the threads around it."""
    node_load_s: float = 0.056
    """83.9 MB read and packed into pinned memory at 1.5 GB/s."""

    def step_time_s(self, num_adapters: int) -> float:
        """A decode step with `num_adapters` distinct adapters in the batch."""
        return self.step_s + (self.lora_step_s + self.adapter_step_s * num_adapters if num_adapters else 0.0)

    def requests_per_s(self, prompt_tokens: float, output_tokens: float, num_adapters: int) -> float:
        """Requests of this size that a full batch with `num_adapters` distinct adapters finishes a second."""
        alone_s = output_tokens * self.step_time_s(num_adapters) / self.num_rows
        return 1 / (alone_s + prompt_tokens * self.prefill_token_s)
