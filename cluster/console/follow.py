"""Waiting on the command line: for an activation to reach the fleet, and for the fleet to be ready."""

import time
from collections.abc import Callable
from typing import Any

from cluster.console.client import ControlClient
from cluster.console.errors import Refused, Unreachable
from cluster.console.render import ShowWait
from registry.types import UNDER_WAY, Activation, ActivationState

POLL_S = 0.5
HOLD_S = 2.0
"""How long the server may hold one question about an activation."""
PAUSE_S = 0.05
"""Between two questions, should the server not hold them."""

Sleep = Callable[[float], None]
Clock = Callable[[], float]


def follow(
    client: ControlClient,
    activation: Activation,
    show: ShowWait,
    *,
    timeout_s: float,
    sleep: Sleep = time.sleep,
    clock: Clock = time.monotonic,
) -> Activation:
    """Ask until the alias has moved and every gateway knows; raises Refused when it fails or takes too long."""
    deadline_s = clock() + timeout_s
    while activation.state in UNDER_WAY:
        show(waiting_line(activation))
        left_s = deadline_s - clock()
        if left_s <= 0:
            hint = "the server goes on; look again with: lorafleet show " + activation.name
            raise Refused(f"gave up after {timeout_s:g} s: {waiting_line(activation)}", code="timeout", hint=hint)
        activation = _ask_again(client, activation, min(HOLD_S, left_s))
        sleep(PAUSE_S)
    return arrived(activation)


def _ask_again(client: ControlClient, activation: Activation, hold_s: float) -> Activation:
    """The activation as it is now; as it was while the server restarts, for an activation outlives that."""
    try:
        return client.activation(activation.activation_id, wait_s=hold_s)
    except Unreachable:
        return activation


def arrived(activation: Activation) -> Activation:
    """The activation, if it went through. Raises Refused with the reason otherwise."""
    version, alias = f"{activation.name}@{activation.number}", activation.alias
    if activation.state is ActivationState.FAILED:
        reason = activation.error or "no reason was given"
        hint = f"{alias} stays where it was"
        raise Refused(f"{version} is not {alias}: {reason}", code="staging_failed", hint=hint)
    if activation.state is ActivationState.SUPERSEDED:
        raise Refused(f"{version} is not {alias}: a later activation replaced it", code="superseded")
    return activation


def waiting_line(activation: Activation) -> str:
    version, who = f"{activation.name}@{activation.number}", ", ".join(activation.waiting_for)
    if activation.state is ActivationState.FLIPPED:
        return f"{version} is {activation.alias}; telling the gateways {who}".rstrip()
    return f"staging on replicas {who}" if who else f"activating {version}"


def wait_ready(
    client: ControlClient,
    show: ShowWait,
    *,
    timeout_s: float,
    sleep: Sleep = time.sleep,
    clock: Clock = time.monotonic,
) -> dict[str, Any]:
    """Ask `/ready` until it says yes; returns its body. Raises the last reason once `timeout_s` is over."""
    deadline_s = clock() + timeout_s
    while True:
        trouble = _ready_trouble(client)
        if isinstance(trouble, dict):
            return trouble
        show(f"waiting for the fleet: {trouble.message}")
        if clock() >= deadline_s:
            raise trouble
        sleep(POLL_S)


def _ready_trouble(client: ControlClient) -> dict[str, Any] | Refused | Unreachable:
    try:
        ready, body = client.ready()
    except Unreachable as error:
        return error
    return body if ready else Refused(what_is_missing(body), code="not_ready")


def what_is_missing(body: dict[str, Any]) -> str:
    """The reasons in the body of `/ready`, in one line."""
    error = body.get("error")
    if isinstance(error, dict) and error.get("message"):
        return str(error["message"])
    missing = body.get("missing") or body.get("reason") or "it is not ready"
    return ", ".join(str(part) for part in missing) if isinstance(missing, list) else str(missing)
