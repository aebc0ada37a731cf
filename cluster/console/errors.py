"""Why a command ended badly, and the exit status that says so.

ControlError
├── Refused        the server said no, or what was asked cannot be done (exit status 1)
├── WrongUsage     the command line itself is wrong (exit status 2)
└── Unreachable    no server answered (exit status 3)
"""

from typing import Any

from registry.types import Fault


class ControlError(Exception):
    """Base of what ends a command; `message` is one line in plain words, `hint` says what to do."""

    exit_status = 1
    code = "error"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def as_json(self) -> dict[str, Any]:
        """The error as `--json` prints it: the shape of the server's own error body."""
        return {"message": self.message, "code": self.code, "hint": self.hint}


class Refused(ControlError):
    """The server's answer, with its stable `code`; an invalid adapter carries every fault."""

    def __init__(
        self, message: str, *, code: str = "refused", faults: tuple[Fault, ...] = (), hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.faults = faults

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "faults": [fault.model_dump(mode="json") for fault in self.faults]}


class WrongUsage(ControlError):
    exit_status = 2
    code = "usage"


class Unreachable(ControlError):
    exit_status = 3
    code = "unreachable"
