"""A child process that pushes, activates, rolls back, retires and collects, printing each acknowledgement, until it
is killed. Each line is JSON: what was done, and what must be true of the version from then on."""

import json
import random
import sys
import time
from pathlib import Path

from registry.errors import RegistryError
from registry.service import Registry
from tests.registry.uploads import make_base, open_registry, plain_upload

BASE = make_base()
RETENTION = {"keep_versions": 3, "min_age_s": 0, "unused_s": 0, "grace_s": 0}


def say(kind: str, **facts: object) -> None:
    print(json.dumps({"kind": kind, **facts}), flush=True)


def stage(registry: Registry) -> None:
    """One replica has everything that is asked for."""
    digests = [version.digest for record in registry.adapters() for version in record.versions]
    registry.leave_replica("r")
    registry.join_replica(replica_id="r", node_id="n", num_slots=1, base_digest=BASE.digest, staged=digests)
    registry.renew_replica("r", revision=10**9, staged=digests, held=digests)
    registry.advance()


def main(folder: Path, seed: int) -> None:
    registry = open_registry(folder / "data", time.time, retention=RETENTION)
    registry.publish_base(BASE, actor="churner")
    source = random.Random(seed)
    while True:
        files = plain_upload(folder / f"u{seed}", BASE, source.randrange(40))
        result = registry.push("alice", files, owner="o")
        say("pushed", number=result.version.number, digest=result.version.digest)
        stage(registry)
        if registry.adapter("alice").aliases.get("live") == result.version.number:
            say("live", number=result.version.number, revision=registry.adapter("alice").revision)
        for operation in source.sample(("rollback", "retire", "collect"), 2):
            try:
                if operation == "rollback":
                    registry.rollback("alice", "live", actor="o")
                    stage(registry)
                elif operation == "retire":
                    number = source.randint(1, result.version.number)
                    registry.retire("alice", number, actor="o", deadline_s=0)
                else:
                    registry.collect(actor="o")
            except RegistryError:
                continue
            say(operation, revision=registry.adapter("alice").revision)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
