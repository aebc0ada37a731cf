"""What a load is expected to take, whatever sizes came before."""

import pytest

from replica.adapters.load_cost import LoadCost

KB, MB = 1000, 1000 * 1000


def cost_of(*loads: tuple[int, float]) -> LoadCost:
    cost = LoadCost()
    for num_bytes, seconds in loads:
        cost.add(num_bytes, seconds)
    return cost


def test_a_large_adapter_after_a_tiny_one_is_not_charged_by_the_bytes_of_that() -> None:
    cost = cost_of((300 * KB, 0.02))
    assert cost.seconds(90 * MB) == pytest.approx(0.02)
    cost.add(90 * MB, 0.08)
    assert cost.seconds(90 * MB) == pytest.approx(0.08)
    assert cost.seconds(300 * KB) == pytest.approx(0.02)
    assert cost.seconds(45 * MB) == pytest.approx(0.05, rel=0.01)


def test_many_tiny_adapters_say_nothing_of_a_large_one() -> None:
    tiny = [(300 * KB + number, 0.02 + 0.001 * (number % 7)) for number in range(1000)]
    assert cost_of(*tiny).seconds(90 * MB) == pytest.approx(0.026), "the longest"
    cost = cost_of(*tiny, (90 * MB, 0.1))
    assert cost.seconds(90 * MB) == pytest.approx(0.1, rel=0.01)
    assert cost.seconds(300 * KB) == pytest.approx(0.023, rel=0.01)


def test_equal_sizes_cost_their_mean() -> None:
    assert cost_of((1001, 1.0), (1001, 2.0), (1001, 6.0)).seconds(1001) == 3.0


@pytest.mark.parametrize("loads", [[(10, 3.0), (1000, 1.0)], [(10, 0.0), (1000, 1.0)], [(10, 0.0), (20, 0.0)]])
def test_no_part_of_the_cost_is_below_nothing(loads: list[tuple[int, float]]) -> None:
    cost = cost_of(*loads)
    longest_s = max(seconds for _, seconds in loads)
    estimates = [cost.seconds(size) for size in (1, 10, 500, 1000, 10**9)]
    assert estimates == sorted(estimates)
    assert all(0 <= seconds <= longest_s for seconds in estimates)


def test_before_the_first_load_nothing_is_known() -> None:
    assert LoadCost().seconds(90 * MB) == 0
