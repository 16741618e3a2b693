"""Hand-overs: a worker computes the prompt and another decodes, unless the hand-over fails."""

import pytest

from services.core.service import ServiceClass
from services.core.shipments import outgoing
from tests.support.shipping_world import BLOCK_SIZE, Client, ShippingWorld, output_of
from tests.unit.core.shipments.test_shipping import CLASSES, prompt


def handed(world: ShippingWorld, name: str = "w0") -> tuple[int, int]:
    counts = world.nodes[name].machine.shipping.counts
    return counts.handed_over_total, counts.hand_overs_kept_total


def decodes_at_its_start(world: ShippingWorld, client: Client, kept: int) -> None:
    world.finish()
    assert client.worker == "w0" and client.moves == 0
    assert client.tokens == output_of(client.request)
    assert handed(world) == (0, kept)


def test_a_request_is_handed_over_after_its_first_token() -> None:
    world = ShippingWorld(1)
    client = world.start("a", prompt(world, 70), 30, "w0", hand_to="w1")
    world.run_until(lambda: client.moves == 1)
    at_change = len(client.tokens)
    world.finish()
    assert client.tokens == output_of(client.request)
    assert handed(world) == (1, 0)
    # The offer is answered while the prompt runs, so that it leaves with its first token.
    assert at_change == 1
    ran = world.nodes["w0"].ran, world.nodes["w1"].ran
    assert ran[0] == 70
    assert ran[0] + ran[1] <= 70 + 30 - 1 + BLOCK_SIZE + 1
    counts = world.nodes["w0"].machine.shipping.counts
    assert (counts.shipped_total, counts.kept_total) == (0, 0)
    assert counts.shipped_blocks_total == 70 // BLOCK_SIZE


def test_parts_follow_the_chunks_of_the_prompt() -> None:
    world = ShippingWorld(2)
    client = world.start("a", prompt(world, 100), 10, "w0", hand_to="w1")
    sent = world.nodes["w0"].machine.shipping.outgoing
    world.run_until(lambda: sent.shipped_blocks_total > 0)
    assert not client.tokens
    world.finish()
    assert handed(world) == (1, 0)


def test_blocks_that_the_target_has_are_not_sent_again() -> None:
    world = ShippingWorld(3)
    common = prompt(world, 60)
    earlier = world.start("earlier", common, 1, "w1")
    world.run_until(lambda: earlier.over)
    client = world.start("a", (*common, *prompt(world, 20)), 10, "w0", hand_to="w1")
    world.finish()
    assert client.moves == 1
    counts = world.nodes["w0"].machine.shipping.counts
    assert counts.shipped_blocks_total <= 24 // BLOCK_SIZE


@pytest.mark.parametrize("seed", range(10))
def test_a_single_token_request_ends_at_its_first_worker(seed: int) -> None:
    world = ShippingWorld(seed)
    client = world.start("a", prompt(world, 40), 1, "w0", hand_to="w1")
    decodes_at_its_start(world, client, kept=0)
    assert not world.frames


def test_a_non_resumable_request_is_not_handed_over() -> None:
    world = ShippingWorld(4)
    client = world.start("a", prompt(world, 40), 9, "w0", hand_to="w1", resumable=False)
    decodes_at_its_start(world, client, kept=0)


@pytest.mark.parametrize("seed", range(10))
def test_a_request_that_ends_with_its_first_token_counts_as_no_failure(seed: int) -> None:
    world = ShippingWorld(seed)
    client = world.start("a", prompt(world, 40), 9, "w0", hand_to="w1", stops=True)
    world.run_until(lambda: client.over)
    world.finish()
    assert client.moves == 0 and len(client.tokens) == 1
    assert handed(world) == (0, 0)


def test_a_refused_request_stays_at_its_worker() -> None:
    world = ShippingWorld(5, layouts=("one", "other"))
    client = world.start("a", prompt(world, 40), 20, "w0", hand_to="w1")
    decodes_at_its_start(world, client, kept=1)


def test_a_request_without_an_answer_stays_at_its_worker() -> None:
    world = ShippingWorld(6, num_blocks=200)
    client = world.start("a", prompt(world, 40), 600, "w0", hand_to="w1")
    w0 = world.nodes["w0"]
    w0.turn()
    world.frames.clear()  # the offer is never read
    while not client.over:
        world.now_s += 0.01
        w0.turn()
    decodes_at_its_start(world, client, kept=1)


def test_an_unresponsive_worker_gets_few_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "UNANSWERED_MAX", 3)
    world = ShippingWorld(9, num_blocks=400)
    for number in range(6):
        world.start(f"r{number}", prompt(world, 20), 100, "w0", hand_to="w1")
    w0 = world.nodes["w0"]
    for _ in range(30):  # frames are never read
        w0.turn()
    assert len(world.frames["w0", "w1"]) == 3
    assert handed(world) == (0, 3)
    world.finish()
    assert handed(world)[0] == 3


@pytest.mark.parametrize("seed", range(40))
def test_a_request_survives_the_loss_of_its_target(seed: int) -> None:
    world = ShippingWorld(seed)
    client = world.start("a", prompt(world, 100), 40, "w0", hand_to="w1")
    for _ in range(world.rng.randrange(60)):
        world.turn()
    world.part("w0", "w1")
    world.finish()
    assert client.tokens == output_of(client.request)
    assert sum(handed(world)) == 1
    assert (client.worker == "w1") is (handed(world)[0] == 1)


def test_a_handed_over_request_stays() -> None:
    """Its start at the target names a worker for a hand-over, too."""
    world = ShippingWorld(7)
    client = world.start("a", prompt(world, 40), 60, "w0", hand_to="w1")
    world.run_until(lambda: client.moves == 1)
    world.finish()
    assert client.moves == 1 and handed(world, "w1") == (0, 0)


def test_a_slow_link_lets_the_request_decode_until_its_kv_is_there() -> None:
    world = ShippingWorld(8, layer_blocks_per_s=10.0)
    client = world.start("a", prompt(world, 100), 60, "w0", hand_to="w1")
    w0 = world.nodes["w0"]
    world.run_until(lambda: bool(world.parts))
    while len(client.tokens) < 5:  # no part moves
        world.now_s += 0.01
        w0.turn()
    assert client.worker == "w0"
    world.finish()
    assert client.worker == "w1" and handed(world) == (1, 0)


@pytest.mark.parametrize("seed", range(30))
def test_random_hand_overs_moves_losses_aborts_and_pressure(seed: int) -> None:
    explore(seed)


def explore(seed: int) -> ShippingWorld:
    world = ShippingWorld(seed, workers=3, num_blocks=(34, 48, 120)[seed % 3])
    rng, names = world.rng, list(world.nodes)
    begins = [prompt(world, 60), prompt(world, 40)]
    for number in range(14):
        begin = rng.choice(begins)[: rng.randrange(60)]
        tokens = (*begin, *prompt(world, rng.randint(1, 20)))
        source, target = rng.sample(names, 2)
        world.start(
            f"r{number}",
            tokens,
            rng.randint(1, 50),
            source,
            rng.choice(["", "", "s"]),
            CLASSES if seed % 2 else (ServiceClass.STANDARD,),
            hand_to=target if rng.random() < 0.7 else "",
        )
        for _ in range(rng.randrange(120)):
            world.turn()
        if rng.random() < 0.3:
            world.ship(*rng.sample(names, 2), rng.randrange(3))
        if rng.random() < 0.15:
            world.part(*rng.sample(names, 2))
        if rng.random() < 0.1:
            world.abort(rng.choice(list(world.clients)))
    world.finish()
    return world


def test_random_worlds_hand_requests_over() -> None:
    """Guards the property test above against an empty run."""
    worlds = [explore(seed) for seed in range(20)]
    totals = [handed(world, name) for world in worlds for name in world.nodes]
    assert sum(done for done, _ in totals) > 60
    assert sum(kept for _, kept in totals) > 10


def test_a_hand_over_before_the_first_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "decodes", lambda _sequence: True)
    with pytest.raises(AssertionError, match="before its first token"):
        for seed in range(60):
            explore(seed)
