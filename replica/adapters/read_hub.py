"""The one process that a replica has its adapters read by: it hands the shares to workers, which are forks of it.

A fork takes no import and little memory, and the replica is spared the talk with each of them: one request for an
adapter, one answer. It ends when the replica is gone or closes its end of a socket, and its workers with it. Knows
nothing of the replica but its host memory and the projections of its base.
"""

import logging
import os
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from mmap import mmap
from multiprocessing.connection import Connection, wait

import torch

from replica.adapters.files import BytesChanged
from replica.adapters.read_worker import MAX_PATH_BYTES, ReadAnswer, ReadRequest, ReadWorker, receive, work
from replica.errors import AdapterUnavailable
from replica.model.batch import Site

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HubSetup:
    """What the hub is told first."""

    sites: tuple[Site, ...]
    dtype: torch.dtype
    memory_bytes: int
    num_workers: int


@dataclass(slots=True)
class _Job:
    """An adapter that `lane` asked for; answers by the number of the share."""

    lane: Connection
    num_shares: int
    answers: dict[int, ReadAnswer] = field(default_factory=dict)

    def answer(self) -> ReadAnswer:
        """For the whole adapter: the mean of the shares' times, or the error of the first that has one.

        That its bytes have changed goes first: then the file is no good, whatever else is wrong.
        """
        found = [self.answers[index] for index in sorted(self.answers)]
        errors = [each.error for each in found if each.error is not None]
        changed = [error for error in errors if isinstance(error, BytesChanged)]
        return ReadAnswer(sum(each.convert_share for each in found) / len(found), next(iter(changed + errors), None))


@dataclass(slots=True)
class _Task:
    job: _Job
    index: int
    request: ReadRequest
    num_deaths: int = 0


@dataclass(slots=True)
class _Worker:
    index: int
    pid: int
    requests: Connection
    expected: socket.socket
    task: _Task | None = None


class ReadHub:
    """Any number of lanes, on each of which the replica asks for one adapter at a time."""

    def __init__(
        self, setup: HubSetup, memory: mmap, lanes: Sequence[Connection], expected: socket.socket, lifeline: int
    ) -> None:
        self._setup, self._memory = setup, memory
        self._lanes, self._expected, self._lifeline = lanes, expected, lifeline
        self._tasks: deque[_Task] = deque()
        self._workers = [self._fork(index) for index in range(setup.num_workers)]

    def __repr__(self) -> str:
        return f"ReadHub({len(self._tasks)} shares wait, workers {[worker.pid for worker in self._workers]})"

    def run(self) -> None:
        """Ends with EOFError or ConnectionError, when the replica does."""
        while True:
            workers = {worker.requests: worker for worker in self._workers}
            for ready in wait([*self._lanes, self._expected, *workers]):
                if ready is self._expected:
                    self._expect()
                elif isinstance(ready, Connection) and ready in workers:
                    self._take(workers[ready])
                elif isinstance(ready, Connection):
                    self._accept(ready)
            self._hand_out()

    def _accept(self, lane: Connection) -> None:
        requests: list[ReadRequest] = receive(lane)
        job = _Job(lane, len(requests))
        self._tasks += [_Task(job, index, request) for index, request in enumerate(requests)]

    def _expect(self) -> None:
        path = self._expected.recv(MAX_PATH_BYTES)
        if not path:
            raise EOFError
        for worker in self._workers:
            with suppress(OSError):
                worker.expected.send(path, socket.MSG_DONTWAIT)

    def _hand_out(self) -> None:
        for worker in self._workers:
            if worker.task is None and self._tasks:
                worker.task = self._tasks.popleft()
                with suppress(OSError):  # it has ended, and will be found to have
                    worker.requests.send(worker.task.request)

    def _take(self, worker: _Worker) -> None:
        """An answer, or the end of a worker, as when the kernel is short of memory: another takes its place."""
        try:
            answer: ReadAnswer = receive(worker.requests)
        except EOFError:
            self._replace(worker)
        else:
            assert worker.task is not None
            task, worker.task = worker.task, None
            self._settle(task, answer)

    def _replace(self, worker: _Worker) -> None:
        worker.requests.close()
        worker.expected.close()
        os.waitpid(worker.pid, 0)  # from here on it writes nothing
        self._workers[self._workers.index(worker)] = self._fork(worker.index)
        task = worker.task
        _logger.warning("a process that reads adapters, %d, ended; another takes its place", worker.pid)
        if task is None:
            return
        task.num_deaths += 1
        if task.num_deaths < 2:
            self._tasks.appendleft(task)
        else:
            message = f"{task.request.path.name}: the process that reads it ended, and so did the next one"
            self._settle(task, ReadAnswer(error=AdapterUnavailable(message)))

    def _settle(self, task: _Task, answer: ReadAnswer) -> None:
        job = task.job
        job.answers[task.index] = answer
        if len(job.answers) == job.num_shares:
            job.lane.send(job.answer())

    def _fork(self, index: int) -> _Worker:
        """A new worker, which has said that it is there. Raises EOFError when it ended instead."""
        requests, their_requests = socket.socketpair()
        expected, their_expected = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            try:
                _close_all_but({their_requests.fileno(), their_expected.fileno(), self._lifeline})
                setup = self._setup
                worker = ReadWorker(setup.sites, setup.dtype, self._memory, index, setup.num_workers)
                work(worker, Connection(their_requests.detach()), their_expected)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)  # its other thread may be anywhere, and nothing is left to be done
        their_requests.close()
        their_expected.close()
        found = _Worker(index, pid, Connection(requests.detach()), expected)
        receive(found.requests)
        return found


def _close_all_but(kept: set[int]) -> None:
    """A fork that held a socket of another would keep that from ending."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with suppress(OSError):
                os.close(int(name))


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whoever started the replica may have left it ignored
    lifeline, memory, expected, *lanes = (int(argument) for argument in sys.argv[1:])
    connections = [Connection(lane) for lane in lanes]
    with suppress(EOFError, ConnectionError):
        setup: HubSetup = receive(connections[0])
        area = mmap(memory, setup.memory_bytes)
        hub = ReadHub(setup, area, connections, socket.socket(fileno=expected), lifeline)
        connections[0].send(None)
        hub.run()
    os._exit(0)
