"""A fleet whose replicas can be made to hang in a step, as in a call to a GPU that does not come back.

`build` is a builder like `cluster.app:build_fleet`. A replica whose process id stands in the file `hang`
beside the node store stays in its next step while it stands there; everything else of the process goes on.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ray.serve import Application

from cluster.app import fleet
from cluster.config import load_fleet
from replica.config import ModelConfig, ReplicaConfig
from replica.model.base_model import BaseModel
from replica.replica import Replica
from tests.fleet_process import HANG

POLL_S = 0.05


def hanging(forward: Callable[..., torch.Tensor], file: Path) -> Callable[..., torch.Tensor]:
    """`forward`, but not while the file names this process."""

    def step(*args: Any, **kwargs: Any) -> torch.Tensor:
        while file.exists() and str(os.getpid()) in file.read_text().split():
            time.sleep(POLL_S)
        return forward(*args, **kwargs)

    return step


def hanging_replica(config: ReplicaConfig, source: Any) -> Replica:
    def load(model: ModelConfig) -> BaseModel:
        base = BaseModel.load(model)
        base.forward = hanging(base.forward, config.adapters.node_store.parent / HANG)  # type: ignore[method-assign]
        return base

    return Replica(config, source, model_loader=load, stall_s=config.stall_s)


def build(args: dict[str, Any]) -> Application:
    return fleet(load_fleet(args), replica_factory=hanging_replica)
