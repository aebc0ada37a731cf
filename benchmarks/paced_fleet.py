"""A fleet whose engine is real but whose base model only sleeps, for measuring everything around the model.

`build` is a Serve application builder like `cluster.app:build_fleet`; each step takes STEP_S, whatever the batch.
"""

from typing import Any

from ray.serve import Application

from cluster.app import fleet
from cluster.config import load_fleet
from replica.config import ModelConfig, ReplicaConfig
from replica.model.base_files import resolve_base
from replica.model.base_model import BaseModel
from replica.replica import Replica
from tests.fakes import PacedModel

STEP_S = 0.02
LETTER = "a"


def load_paced(config: ModelConfig) -> PacedModel:
    """The paced stand-in for a base: its spec and tokenizer are real, so that requests look as they always do."""
    real = BaseModel.load(config)
    tokenizer_json = (resolve_base(config) / "tokenizer.json").read_bytes()
    return PacedModel(real.spec, tokenizer_json, sites=real.sites, step_s=STEP_S, token_id=ord(LETTER) - 33)


def paced_replica(config: ReplicaConfig, source: Any) -> Replica:
    return Replica(config, source, model_loader=load_paced)


def build(args: dict[str, Any]) -> Application:
    return fleet(load_fleet(args), replica_factory=paced_replica)
