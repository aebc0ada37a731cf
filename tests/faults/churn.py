"""Load for a real fleet that is being killed: writers of versions, readers of answers, and what each was promised.

Contents are few and known: an answer's fingerprint names the content it claims, and PEFT's text says whether it is so.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx
import torch
from transformers import AutoTokenizer

from cluster.console.client import ControlClient
from cluster.console.errors import ControlError, Unreachable
from registry.types import UNDER_WAY, Activation, ActivationState, AdapterRecord, PushResult, VersionState
from tests.tiny_models import load_peft

Answer = TypeVar("Answer")
PROMPT, NUM_TOKENS = "Hello", 5
RETRY_S, PATIENCE_S, DEADLINE_S = 0.1, 60.0, 20.0
RETRYABLE = frozenset({"registry_unavailable", "unreachable"})
"""What a control call may end with while the registry restarts."""
RETRYABLE_ANSWERS = frozenset({"replica_gone"})
"""What a request by alias may end with: it had its first token when its replica died."""


@dataclass(frozen=True)
class Content:
    """An adapter on disk, the digest that the fleet gave it, and what PEFT says with it."""

    folder: Path
    digest: str
    text: str


def greedy_text(base: Path, folder: Path) -> str:
    """PEFT's own greedy continuation of PROMPT."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.inference_mode():
        model = load_peft(base, folder)
        output = model.generate(input_ids=ids, max_new_tokens=NUM_TOKENS, do_sample=False)  # type: ignore[operator]
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def push(control: ControlClient, name: str, folder: Path, *, activate: bool) -> PushResult:
    with ExitStack() as files:
        parts = [
            ("files", (path.name, files.enter_context(path.open("rb")), "application/octet-stream"))
            for path in sorted(folder.iterdir())
        ]
        return control.push(name, parts, activate=activate)


def learn(control: ControlClient, base: Path, folders: Sequence[Path]) -> list[Content]:
    """Every content under the name `known`, so that its digest is known before the trouble begins."""
    return [
        Content(folder, push(control, "known", folder, activate=False).version.digest, greedy_text(base, folder))
        for folder in folders
    ]


def until_answered(ask: Callable[[], Answer], failures: Counter[str]) -> Answer:
    """Ask again while the registry restarts; anything but a retryable refusal is raised."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except ControlError as error:
            if code_of(error) not in RETRYABLE or time.monotonic() > end_s:
                raise
            failures[code_of(error)] += 1
            time.sleep(RETRY_S)


def code_of(error: ControlError) -> str:
    return "unreachable" if isinstance(error, Unreachable) else error.code


class Worker(threading.Thread):
    """Turns until it is stopped; the first thing that goes wrong is kept as `fault` and ends it."""

    def __init__(self, seed: int) -> None:
        super().__init__(daemon=True)
        self.random = random.Random(seed)
        self.fault: BaseException | None = None
        self.num_turns = 0
        self._halt = threading.Event()

    def run(self) -> None:
        try:
            while not self._halt.is_set():
                self.turn()
                self.num_turns += 1
        except BaseException as error:
            self.fault = error

    def turn(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self._halt.set()


class Writer(Worker):
    """The only one that changes its adapter; what it was told must be true from then on."""

    def __init__(self, url: str, name: str, contents: Sequence[Content], seed: int) -> None:
        super().__init__(seed)
        self.adapter = name
        self.doing = "nothing"
        self.promised: dict[int, str] = {}
        """Number -> digest, of every acknowledged upload."""
        self.acknowledged: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._contents = contents
        self._control = ControlClient(url)
        self._revision = 0

    def turn(self) -> None:
        operation = self.random.choices(("push", "activate", "rollback", "retire", "collect"), (5, 3, 3, 2, 2))[0]
        self.doing = operation
        try:
            getattr(self, f"_{operation}")()
            self.acknowledged[operation] += 1
        except ControlError as error:
            if code_of(error) not in RETRYABLE | {"conflict", "adapter_not_found"}:
                raise
            self.failures[code_of(error)] += 1
            time.sleep(RETRY_S)
        finally:
            self.doing = "nothing"
        self.check(until_answered(lambda: self._control.adapter(self.adapter), self.failures))

    def _push(self) -> None:
        content = self.random.choice(self._contents)
        result = push(self._control, self.adapter, content.folder, activate=True)
        assert result.version.digest == content.digest, "the answer is about another upload"
        self.promised[result.version.number] = content.digest
        assert result.activation is not None
        self._see_through(result.activation)

    def _activate(self) -> None:
        record = self._record()
        number = self.random.choice([each.number for each in record.versions if each.state is VersionState.ACTIVE])
        self._see_through(self._control.set_alias(self.adapter, "live", number))

    def _rollback(self) -> None:
        self._see_through(self._control.rollback(self.adapter, "live"))

    def _retire(self) -> None:
        number = self.random.choice(self._record().versions).number
        self._control.retire(self.adapter, number, DEADLINE_S)
        version = self._record().version(number)
        assert version is not None
        assert version.state is not VersionState.ACTIVE

    def _collect(self) -> None:
        self._control.collect(dry_run=False)

    def _see_through(self, activation: Activation) -> None:
        """An acknowledged activation outlives every restart, and its alias has moved when it is done."""
        self.doing = "activate"
        end_s = time.monotonic() + PATIENCE_S
        while activation.state in UNDER_WAY:
            assert time.monotonic() < end_s, f"forgotten: {activation}"
            ask = partial(self._control.activation, activation.activation_id, wait_s=5.0)
            activation = until_answered(ask, self.failures)
        assert activation.state is ActivationState.DONE, activation
        assert self._record().aliases["live"] == activation.number
        self.acknowledged["live"] += 1

    def _record(self) -> AdapterRecord:
        return until_answered(lambda: self._control.adapter(self.adapter), self.failures)

    def check(self, record: AdapterRecord) -> None:
        """Nothing that was acknowledged is gone or other; nothing half-made shows."""
        assert record.revision >= self._revision, "the registry went back in time"
        self._revision = record.revision
        for number, digest in self.promised.items():
            version = record.version(number)
            assert version is not None, f"{self.adapter}@{number} was acknowledged and is gone"
            assert version.digest == digest, f"{self.adapter}@{number} became another version"
        known = {content.digest for content in self._contents}
        assert {version.digest for version in record.versions} <= known
        live = record.version(record.aliases.get("live", 0))
        assert "live" not in record.aliases or (live is not None and live.state is VersionState.ACTIVE)


@dataclass
class Answers:
    """What readers got."""

    right: int = 0
    by_error: Counter[str] = field(default_factory=Counter)


class Reader(Worker):
    """Asks by alias, and for a version by its number as soon as the registry shows it; checks every answer."""

    def __init__(self, url: str, names: Sequence[str], contents: Sequence[Content], seed: int) -> None:
        super().__init__(seed)
        self.answers = Answers()
        self._url, self._names = url, names
        self._texts: Mapping[str, str] = {f"fp_{each.digest[:16]}": each.text for each in contents}
        self._control = ControlClient(url)
        self._http = httpx.Client(timeout=120)

    def turn(self) -> None:
        model = self.random.choice(self._names)
        for _ in range(4):
            self._ask(model, RETRYABLE_ANSWERS)
        try:
            record = self._control.adapter(model)
        except ControlError as error:
            if code_of(error) not in RETRYABLE:
                raise
            return
        active = [version.number for version in record.versions if version.state is VersionState.ACTIVE]
        retired_meanwhile = {"model_not_found", "adapter_withdrawn"}
        self._ask(f"{model}@{self.random.choice(active)}", RETRYABLE_ANSWERS | retired_meanwhile)

    def _ask(self, model: str, may_fail_with: frozenset[str] | set[str]) -> None:
        body = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
        response = self._http.post(f"{self._url}/v1/completions", json=body)
        data = response.json()
        if response.status_code != 200:
            code = str(data["error"]["code"])
            assert code in may_fail_with, f"{model}: {response.text}"
            self.answers.by_error[code] += 1
            return
        assert data["choices"][0]["text"] == self._texts[data["system_fingerprint"]], f"{model}: {data}"
        self.answers.right += 1


@contextmanager
def working(workers: Sequence[Worker]) -> Iterator[None]:
    """Start the workers, stop them in the end, and raise the first fault of any."""
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.join(2 * PATIENCE_S)
    raise_faults(workers)


def raise_faults(workers: Sequence[Worker]) -> None:
    for worker in workers:
        if worker.fault is not None:
            raise worker.fault
