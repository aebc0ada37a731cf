"""Commands from any thread to the one that runs a loop, and the sleep of that loop. Knows not what the commands do."""

import threading
from collections import deque
from collections.abc import Callable

Command = Callable[[], None]


class Mailbox:
    """A loop calls `take`, does its work, notes `progress`, and calls `sleep` when it can do no more."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.lock = threading.RLock()
        """Guards what the commands' senders share with the loop; held by `take` and `sleep` only for a moment."""
        self._clock = clock
        self._changed = threading.Condition(self.lock)
        self._commands: deque[Command] = deque()
        self._is_woken = False
        self._is_idle = False
        self._is_closed = False
        self._progress_at_s = clock()

    def __repr__(self) -> str:
        return f"Mailbox(commands={len(self._commands)}, idle={self._is_idle}, closed={self._is_closed})"

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def post(self, command: Command) -> None:
        """Have the loop run `command` before its next step."""
        with self.lock:
            if self._is_idle and not self._commands:
                self._progress_at_s = self._clock()
            self._commands.append(command)
            self.wake()

    def wake(self) -> None:
        """Make an idle loop look again."""
        with self.lock:
            self._is_woken = True
            self._changed.notify()

    def close(self) -> None:
        """Tell the loop to end."""
        with self.lock:
            self._is_closed = True
            self.wake()

    def take(self) -> deque[Command]:
        """The commands since the last call; what wakes the loop from here on counts for its next sleep."""
        with self.lock:
            commands, self._commands = self._commands, deque()
            self._is_woken = False
            return commands

    def progress(self) -> None:
        """Note that the loop has ended a step."""
        self._progress_at_s = self._clock()

    def sleep(self, timeout_s: float) -> None:
        """Wait until woken, closed, or `timeout_s` seconds have passed."""
        with self.lock:
            self._is_idle = True
            self._changed.wait_for(lambda: self._is_woken, timeout_s)
            self._is_idle = False

    def is_stalled(self, stall_s: float) -> bool:
        """Whether there was work and no step has ended for `stall_s` seconds."""
        with self.lock:
            rests = self._is_idle and not self._commands
            return not rests and self._clock() - self._progress_at_s >= stall_s


def run_between_steps(mailbox: Mailbox, action: Command, timeout_s: float) -> None:
    """Run `action` on the loop's thread and wait for it. Raises what it raises, or TimeoutError."""
    done, errors = threading.Event(), list[Exception]()

    def report() -> None:
        try:
            action()
        except Exception as error:
            errors.append(error)
        finally:
            done.set()

    mailbox.post(report)
    if not done.wait(timeout_s):
        raise TimeoutError(f"no step ended within {timeout_s} s")
    if errors:
        raise errors[0]
