"""Following an activation and the change log through a server that restarts meanwhile."""

from collections.abc import Callable, Iterator

import httpx
import pytest

from cluster.console.client import ControlClient
from cluster.console.errors import Refused, Unreachable
from cluster.console.follow import follow, wait_ready, waiting_line
from cluster.console.render import Output
from cluster.console.watch import HOLD_S, run_watch
from registry.types import Activation, ActivationState, Event

PENDING = Activation(
    activation_id=1,
    name="legal",
    alias="live",
    number=2,
    digest="a" * 64,
    state=ActivationState.PENDING,
    requested_at_s=0.0,
    waiting_for=("replica-0",),
)


def answering(answers: Iterator[httpx.Response | Exception]) -> ControlClient:
    """A client whose server gives these answers, one a call."""

    def answer(request: httpx.Request) -> httpx.Response:
        given = next(answers)
        if isinstance(given, Exception):
            raise given
        return given

    return ControlClient("http://host", transport=httpx.MockTransport(answer))


def activation(state: ActivationState, **changes: object) -> httpx.Response:
    return httpx.Response(200, json=PENDING.model_copy(update={"state": state, **changes}).model_dump(mode="json"))


def ticking() -> Callable[[], float]:
    """A clock that is one second later each time it is read."""
    seconds = iter(range(1000))
    return lambda: float(next(seconds))


def test_follow_outlives_a_restart_of_the_server() -> None:
    answers = [httpx.ConnectError("refused"), activation(ActivationState.FLIPPED), activation(ActivationState.DONE)]
    shown: list[str] = []
    client = answering(iter(answers))
    ended = follow(client, PENDING, shown.append, timeout_s=60, sleep=lambda seconds: None, clock=ticking())
    assert ended.state is ActivationState.DONE
    assert shown[0] == shown[1] == "staging on replicas replica-0"
    assert shown[2] == "legal@2 is live; telling the gateways replica-0"


def test_follow_superseded_activation_is_refused() -> None:
    client = answering(iter([activation(ActivationState.SUPERSEDED)]))
    with pytest.raises(Refused, match="legal@2 is not live: a later activation replaced it"):
        follow(client, PENDING, lambda message: None, timeout_s=60, sleep=lambda seconds: None, clock=ticking())


def test_follow_asks_for_a_decimal_wait_even_when_little_time_is_left() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.params["wait_s"])
        return activation(ActivationState.DONE)

    client = ControlClient("http://host", transport=httpx.MockTransport(answer))
    follow(client, PENDING, lambda message: None, timeout_s=1e-6, clock=lambda: 0.0)
    assert asked == ["0.000"]


def test_waiting_line_without_names_says_what_is_under_way() -> None:
    assert waiting_line(PENDING.model_copy(update={"waiting_for": ()})) == "activating legal@2"


def test_set_alias_and_rollback_never_block_on_the_server() -> None:
    bodies: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(request.content)
        return activation(ActivationState.PENDING)

    client = ControlClient("http://host", transport=httpx.MockTransport(answer))
    client.set_alias("legal", "live", 2)
    client.rollback("legal", "live")
    assert [b'"wait":false' in body for body in bodies] == [True, True]


def test_wait_ready_waits_through_every_kind_of_not_yet() -> None:
    answers = [
        httpx.ConnectError("refused"),
        httpx.Response(404, text="Path '/ready' not found."),
        httpx.Response(503, json={"ready": False, "missing": ["base"], "error": {"message": "not ready: no base yet"}}),
        httpx.Response(200, json={"ready": True, "missing": []}),
    ]
    shown: list[str] = []
    body = wait_ready(answering(iter(answers)), shown.append, timeout_s=60, sleep=lambda seconds: None, clock=ticking())
    assert body["ready"] is True
    assert shown == [
        "waiting for the fleet: nothing answers at http://host",
        "waiting for the fleet: http://host answers, but not yet as a gateway (HTTP 404)",
        "waiting for the fleet: not ready: no base yet",
    ]


def test_watch_outlives_a_restart_and_misses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [events(1, 2), httpx.ConnectError("refused"), httpx.ConnectError("refused"), events(3), events()]
    run_watch(answering(iter(answers)), Output(), after=0, once=True, sleep=lambda seconds: None)
    out, err = capsys.readouterr()
    assert [line.split()[2] for line in out.splitlines()] == ["r1", "r2", "r3"]
    assert err == "nothing answers at http://host; trying again\n"


def test_watch_without_a_server_at_first_ends() -> None:
    client = answering(iter([httpx.ConnectError("refused")]))
    with pytest.raises(Unreachable):
        run_watch(client, Output(), after=0, once=False, sleep=lambda seconds: None)


def test_watch_lets_the_server_hold_the_question() -> None:
    asked: list[tuple[str, float]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.params["after"], float(request.url.params["wait_s"])))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return events(len(asked))

    client = ControlClient("http://host", transport=httpx.MockTransport(answer))
    slept: list[float] = []
    with pytest.raises(KeyboardInterrupt):
        run_watch(client, Output(), after=0, once=False, sleep=slept.append)
    assert asked == [("0", 0.0), ("1", HOLD_S), ("2", HOLD_S)]
    assert not slept


def events(*revisions: int) -> httpx.Response:
    data = [Event(revision=revision, at_s=0.0, kind="version_pushed", actor="a") for revision in revisions]
    return httpx.Response(200, json={"object": "list", "data": [event.model_dump(mode="json") for event in data]})
