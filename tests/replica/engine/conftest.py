"""Settings of the engine's tests."""

import torch

torch.set_num_threads(1)
