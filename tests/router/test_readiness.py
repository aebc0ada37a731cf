"""Whether some replica makes progress: the first that says so decides, and many who ask cost one question."""

import asyncio

from router.readiness import FRESH_S, Readiness


class Replicas:
    """Answers what each replica is set to; None never answers."""

    def __init__(self, **says: bool | None) -> None:
        self.says = says
        self.num_asked = 0
        self.num_open = 0

    async def makes_progress(self, replica_id: str) -> bool:
        self.num_asked += 1
        self.num_open += 1
        try:
            answer = self.says[replica_id]
            await (asyncio.Event().wait() if answer is None else asyncio.sleep(0))
            return bool(answer)
        finally:
            self.num_open -= 1


async def test_first_replica_that_makes_progress_decides_and_the_others_are_let_go() -> None:
    replicas = Replicas(hung=None, stuck=False, good=True)
    async with asyncio.timeout(30):
        assert await Readiness(replicas).has_progress(("hung", "stuck", "good")) is True
    assert replicas.num_open == 0


async def test_replicas_that_are_all_stuck_are_no_fleet() -> None:
    assert await Readiness(Replicas(a=False, b=False)).has_progress(("a", "b")) is False
    assert await Readiness(Replicas()).has_progress(()) is False


async def test_many_who_ask_cost_one_question_until_it_is_old_or_the_replicas_change() -> None:
    now_s = 0.0
    replicas = Replicas(a=True, b=False)
    readiness = Readiness(replicas, lambda: now_s)
    assert all(await asyncio.gather(*(readiness.has_progress(("a",)) for _ in range(50))))
    assert replicas.num_asked == 1
    assert await readiness.has_progress(("b",)) is False
    assert replicas.num_asked == 2
    replicas.says["b"] = True
    assert await readiness.has_progress(("b",)) is False
    now_s = FRESH_S
    assert await readiness.has_progress(("b",)) is True
