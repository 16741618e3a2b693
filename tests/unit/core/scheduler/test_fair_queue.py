"""Predicted tokens ahead of a request in the fair queue, compared with the actual order."""

from random import Random

import pytest

from services.core.scheduler.fair_queue import FairQueue


def filled(rng: Random, tenants: int, requests: int) -> tuple[FairQueue, dict[str, int]]:
    queue, tokens = FairQueue(), dict[str, int]()
    for number in range(requests):
        name, tenant = f"r{number}", f"t{rng.randrange(tenants)}"
        tokens[name] = rng.choice([16, 48, 160, 1600])
        band = (rng.choice([0.0, 1.0]),)
        queue.add(band, tenant, ((rng.random(),), number, name), tokens[name])
        if rng.random() < 0.3:
            queue.charge(band, tenant, rng.choice([16, 160, 1600]))
        queue.check_invariants()
    return queue, tokens


def served_before(queue: FairQueue, tokens: dict[str, int], name: str) -> int:
    before = 0
    for other in queue:
        if other == name:
            return before
        before += tokens[other]
    raise AssertionError(name)


@pytest.mark.parametrize("tenants", [1, 2, 5])
@pytest.mark.parametrize("seed", range(10))
def test_each_turn_goes_to_the_tenant_that_was_served_the_least(seed: int, tenants: int) -> None:
    rng, queue = Random(seed), FairQueue()
    waiting: list[list[tuple[int, int]]] = [[] for _ in range(tenants)]
    for number in range(40):
        tenant, tokens = rng.randrange(tenants), rng.choice([16, 48, 160])
        waiting[tenant].append((number, tokens))
        queue.add((0.0,), str(tenant), ((float(number),), number, f"r{number}"), tokens)
    served, order = [0] * tenants, list[str]()
    while left := [tenant for tenant in range(tenants) if waiting[tenant]]:
        # The first arrival decides a tie.
        turn = min(left, key=lambda tenant: (served[tenant], waiting[tenant][0]))
        number, tokens = waiting[turn].pop(0)
        served[turn] += tokens
        order.append(f"r{number}")
    assert list(queue) == order


@pytest.mark.parametrize("seed", range(20))
def test_tokens_ahead_are_exact_with_a_single_tenant(seed: int) -> None:
    rng = Random(seed)
    queue, tokens = filled(rng, 1, 60)
    for band in (0.0, 1.0):
        key = (rng.random(),)
        ahead = queue.tokens_ahead((band,), "t0", key)
        queue.add((band,), "t0", (key, 1000, "new"), 16)
        assert ahead == served_before(queue, tokens, "new")
        queue.remove((band,), "t0", (key, 1000, "new"))


def test_tokens_ahead_are_right_on_average_with_several_tenants() -> None:
    errors, total = 0, 0
    for seed in range(60):
        rng = Random(seed)
        queue, tokens = filled(rng, 6, 80)
        key, tenant = (rng.random(),), f"t{rng.randrange(7)}"
        ahead = queue.tokens_ahead((0.0,), tenant, key)
        queue.add((0.0,), tenant, (key, 1000, "new"), 16)
        actual = served_before(queue, tokens, "new")
        # Each of the five other tenants is off by at most its largest request.
        assert abs(ahead - actual) <= 6 * 1600
        errors += ahead - actual
        total += actual
    assert abs(errors) < 0.2 * total
