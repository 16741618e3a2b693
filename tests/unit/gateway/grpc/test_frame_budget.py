"""Order and rate at which connections of an address resume."""

import asyncio

from services.gateway.grpc.frame_budget import BURST_STEPS, STEPS_PER_S, FrameBudget

STEPS = 1000


async def test_connections_resume_in_turn_at_the_budget_rate() -> None:
    loop = asyncio.get_running_loop()
    budget, turns, done = FrameBudget(), list[str](), asyncio.Event()
    turns_max = int(2 * STEPS_PER_S / STEPS / 10 + BURST_STEPS / STEPS)

    def proceed(name: str) -> None:
        budget.spend(STEPS)
        turns.append(name)
        if len(turns) == turns_max:
            done.set()
        else:
            budget.wait(name, lambda: proceed(name))

    assert budget.available
    began_s = loop.time()
    for name in "abcd":
        budget.wait(name, lambda name=name: proceed(name))
    assert not budget.available, "others wait"
    budget.forget("d")
    await asyncio.wait_for(done.wait(), 30)
    assert turns == [("abc" * turns_max)[number] for number in range(turns_max)]
    # The last of them may go on with a step.
    assert loop.time() - began_s >= ((turns_max - 1) * STEPS - BURST_STEPS) / STEPS_PER_S
