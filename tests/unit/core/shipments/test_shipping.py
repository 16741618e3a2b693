"""Shipments between workers: correct KV, freed blocks, a single owner."""

import pytest

from services.core.service import ServiceClass
from services.core.shipments.outgoing import AT_ONCE
from tests.support.shipping_world import BLOCK_SIZE, VOCABULARY, ShippingWorld, output_of

CLASSES = (ServiceClass.STANDARD, ServiceClass.BATCH)


def prompt(world: ShippingWorld, tokens: int) -> tuple[int, ...]:
    return tuple(world.rng.randrange(VOCABULARY) for _ in range(tokens))


def test_a_move_recomputes_at_most_a_block_and_a_token() -> None:
    world = ShippingWorld(1)
    client = world.start("a", prompt(world, 40), 60, "w0")
    world.run_until(lambda: len(client.tokens) > 10)
    order = world.ship("w0", "w1")
    world.run_until(lambda: order in world.answers and client.worker == "w1")
    ran = len(client.request.prompt_ids) + len(client.tokens) - 1
    assert world.answers[order].moved == 1 and not world.answers[order].kept
    world.finish()
    assert client.tokens == output_of(client.request)
    nodes = world.nodes
    assert nodes["w0"].ran <= ran
    assert nodes["w0"].ran + nodes["w1"].ran <= 40 + 60 - 1 + BLOCK_SIZE + 1
    counts = nodes["w0"].machine.shipping.counts
    assert (counts.shipped_total, counts.kept_total) == (1, 0)
    assert counts.shipped_blocks_total >= 40 // BLOCK_SIZE
    assert nodes["w1"].machine.shipping.counts.received_total == 1


def test_blocks_that_the_target_has_are_not_sent() -> None:
    world = ShippingWorld(2)
    common = prompt(world, 40)
    earlier = world.start("earlier", common, 1, "w1")
    world.run_until(lambda: earlier.over)
    client = world.start("a", common, 60, "w0")
    world.run_until(lambda: len(client.tokens) > 2)
    world.ship("w0", "w1")
    world.run_until(lambda: client.worker == "w1")
    assert world.nodes["w0"].machine.shipping.counts.shipped_blocks_total <= 60 // BLOCK_SIZE
    world.finish()
    assert client.tokens == output_of(client.request)


def test_no_kv_is_shared_between_salts() -> None:
    world = ShippingWorld(3)
    common = prompt(world, 40)
    client = world.start("a", common, 40, "w0", salt="one")
    world.run_until(lambda: len(client.tokens) > 2)
    world.ship("w0", "w1")
    world.run_until(lambda: client.worker == "w1")
    other = world.start("b", common, 10, "w1", salt="other")
    world.finish()
    assert other.tokens == output_of(other.request)


def test_a_mismatched_layout_is_refused_and_the_request_continues() -> None:
    world = ShippingWorld(4, layouts=("one", "other"))
    client = world.start("a", prompt(world, 40), 60, "w0")
    world.run_until(lambda: len(client.tokens) > 2)
    order = world.ship("w0", "w1")
    world.run_until(lambda: order in world.answers)
    answer = world.answers[order]
    assert answer.moved == 0 and "another model" in answer.reason
    world.finish()
    assert client.worker == "w0" and client.tokens == output_of(client.request)


def test_a_full_target_accepts_no_request() -> None:
    world = ShippingWorld(5, num_blocks=40)
    world.start("there", prompt(world, 100), 50, "w1")
    client = world.start("a", prompt(world, 60), 60, "w0")
    world.run_until(lambda: len(client.tokens) > 2 and world.clients["there"].tokens != [])
    order = world.ship("w0", "w1")
    world.run_until(lambda: order in world.answers)
    assert "lacks free KV blocks" in world.answers[order].reason
    assert client.worker == "w0"
    world.finish()


@pytest.mark.parametrize("online", [True, False])
def test_batch_work_at_the_target_yields_to_online_requests_only(online: bool) -> None:
    world = ShippingWorld(5, num_blocks=40)
    classes = (ServiceClass.STANDARD if online else ServiceClass.BATCH,)
    there = world.start("there", prompt(world, 100), 50, "w1", classes=(ServiceClass.BATCH,))
    client = world.start("a", prompt(world, 60), 60, "w0", classes=classes)
    world.run_until(lambda: len(client.tokens) > 2 and there.tokens != [])
    order = world.ship("w0", "w1")
    world.run_until(lambda: order in world.answers)
    assert world.answers[order].moved == online, world.answers[order]
    assert world.nodes["w1"].planner.load().preemptions_total == online
    world.finish()
    assert there.tokens == output_of(there.request)


def test_kv_of_a_batch_request_on_its_way_does_not_yield_to_offers() -> None:
    world = ShippingWorld(5, workers=3, num_blocks=40)
    batch = world.start("batch", prompt(world, 90), 30, "w0", classes=(ServiceClass.BATCH,))
    world.run_until(lambda: len(batch.tokens) > 2)
    world.ship("w0", "w1")
    w1 = world.nodes["w1"].planner
    world.run_until(lambda: bool(w1.sequence_table.pins))
    online = world.start("online", prompt(world, 60), 60, "w2")
    world.run_until(lambda: len(online.tokens) > 2)
    assert w1.sequence_table.pins.batch_names
    order = world.ship("w2", "w1")
    world.run_until(lambda: order in world.answers)
    assert "lacks free KV blocks" in world.answers[order].reason
    assert online.worker == "w2"
    world.finish()


def test_a_request_moves_ten_times() -> None:
    world = ShippingWorld(6, num_blocks=600)
    client = world.start("a", prompt(world, 20), 1800, "w0")
    world.run_until(lambda: len(client.tokens) > 2)
    for turn in range(20_000):
        if turn % 50 == 0 and client.moves < 10:
            world.ship(client.worker, {"w0": "w1", "w1": "w0"}[client.worker])
        world.turn()
    assert client.moves == 10
    world.finish()
    assert client.tokens == output_of(client.request)


def test_a_request_that_has_just_moved_stays_for_a_while() -> None:
    world = ShippingWorld(7)
    client = world.start("a", prompt(world, 20), 220, "w0")
    world.run_until(lambda: len(client.tokens) > 2)
    world.ship("w0", "w1")
    world.run_until(lambda: client.worker == "w1")
    arrived = len(client.tokens)
    world.run_until(lambda: len(client.tokens) > arrived)
    order = world.ship("w1", "w0")
    assert world.answers[order].moved == 0 and client.worker == "w1"
    world.finish()


def test_a_limited_order_moves_the_largest_requests_that_fit() -> None:
    world = ShippingWorld(9, num_blocks=1200)
    sizes = {"small": 20, "middle": 60, "large": 100, "huge": 400}
    clients = {name: world.start(name, prompt(world, sizes[name]), 300, "w0") for name in sizes}
    world.run_until(lambda: all(len(client.tokens) > 2 for client in clients.values()))
    blocks = {seq.seq_id.split("#")[0]: seq.blocks for seq in world.nodes["w0"].planner.running}
    # Room for the two in the middle, not for the small request beside them.
    order = world.ship("w0", "w1", blocks_max=blocks["large"] + blocks["middle"] + 2)
    world.run_until(lambda: order in world.answers)
    assert world.answers[order].moved == 2
    assert {n for n, client in clients.items() if client.worker == "w1"} == {"large", "middle"}
    world.finish()


def test_an_order_too_small_for_any_request_moves_none() -> None:
    world = ShippingWorld(10)
    client = world.start("a", prompt(world, 60), 60, "w0")
    world.run_until(lambda: len(client.tokens) > 2)
    order = world.ship("w0", "w1", blocks_max=3)
    assert world.answers[order].moved == 0 and client.worker == "w0"
    world.finish()


def test_an_order_moves_a_few_requests_at_a_time() -> None:
    world = ShippingWorld(8, num_blocks=1200)
    clients = [world.start(f"r{n}", prompt(world, 30), 400, "w0") for n in range(7)]
    world.run_until(lambda: all(len(client.tokens) > 2 for client in clients))
    world.ship("w0", "w1", 6)
    assert len(world.frames["w0", "w1"]) == AT_ONCE
    world.run_until(lambda: "order-1" in world.answers)
    answer = world.answers["order-1"]
    assert answer.moved == sum(client.worker == "w1" for client in clients) == 6, answer
    world.finish()


def test_an_order_of_few_blocks_counts_those_that_requests_do_not_share() -> None:
    world = ShippingWorld(9, num_blocks=200)
    common = prompt(world, 80)
    clients = [world.start(f"r{n}", (*common, n), 60, "w0") for n in range(3)]
    world.run_until(lambda: all(len(client.tokens) > 2 for client in clients))
    node = world.nodes["w0"]
    used = node.planner.pool.usable - node.planner.pool.free_count
    # The overload monitor knows only the mean, which is less than the KV of each request.
    mean = -(-used // 3)
    assert mean < len(common) // BLOCK_SIZE
    order = world.ship("w0", "w1", blocks_max=mean)
    world.run_until(lambda: order in world.answers)
    assert world.answers[order].moved >= 1, world.answers[order]
    world.finish()


def test_an_order_for_few_blocks_leaves_larger_requests() -> None:
    world = ShippingWorld(10, num_blocks=200)
    sizes = {"small": 20, "large": 60}
    for name, tokens in sizes.items():
        world.start(name, prompt(world, tokens), 100, "w0")
    world.run_until(lambda: all(len(client.tokens) > 2 for client in world.clients.values()))
    order = world.ship("w0", "w1", blocks_max=12)
    world.run_until(lambda: order in world.answers)
    assert [world.clients[name].worker for name in sizes] == ["w1", "w0"]
    world.finish()


def test_an_order_of_few_blocks_moves_no_batch_request_that_yields() -> None:
    world = ShippingWorld(13, num_blocks=200)
    assert world.nodes["w0"].planner.sequence_table.precedence.batch_yields
    batch = world.start("batch", prompt(world, 30), 100, "w0", classes=(ServiceClass.BATCH,))
    world.run_until(lambda: len(batch.tokens) > 2)
    online = world.start("online", prompt(world, 30), 100, "w0")
    world.run_until(lambda: len(online.tokens) > 2)
    order = world.ship("w0", "w1", blocks_max=100)
    world.run_until(lambda: order in world.answers)
    assert world.answers[order].moved == 1 and online.worker == "w1"
    world.finish()


def test_an_order_ends_although_requests_keep_arriving() -> None:
    world = ShippingWorld(11, num_blocks=400)
    first = world.start("r0", prompt(world, 20), 60, "w0")
    world.run_until(lambda: len(first.tokens) > 2)
    order, count = world.ship("w0", "w1"), 0

    def ended() -> bool:
        nonlocal count
        if sum(not client.over and client.worker == "w0" for client in world.clients.values()) < 3:
            count += 1
            world.start(f"r{count}", prompt(world, 20), 60, "w0")
        return order in world.answers or count > 60

    world.run_until(ended)
    assert world.answers[order].moved == 1 and first.worker == "w1"
    world.finish()


@pytest.mark.parametrize("seed", range(60))
def test_random_moves_losses_aborts_and_pressure(seed: int) -> None:
    world = ShippingWorld(seed, workers=3, num_blocks=(34, 48, 120)[seed % 3])
    rng, names = world.rng, list(world.nodes)
    begins = [prompt(world, 30), prompt(world, 24)]
    for number in range(14):
        begin = rng.choice(begins)[: rng.randrange(30)]
        tokens = (*begin, *prompt(world, rng.randint(1, 20)))
        salt = rng.choice(["", "", "s"])
        world.start(f"r{number}", tokens, rng.randint(1, 60), rng.choice(names), salt, CLASSES)
        for _ in range(rng.randrange(120)):
            world.turn()
        source, target = rng.sample(names, 2)
        if rng.random() < 0.8:
            world.ship(source, target, rng.randrange(3))
        if rng.random() < 0.2:
            world.part(*rng.sample(names, 2))
        if rng.random() < 0.15:
            world.abort(rng.choice([name for name in world.clients]))
    world.finish()


def test_random_worlds_move_requests() -> None:
    """Guards the property test above against an empty run."""
    world = ShippingWorld(11, workers=3, num_blocks=120)
    for number in range(10):
        world.start(f"r{number}", prompt(world, 30), 60, f"w{number % 3}")
    world.run_until(lambda: all(len(client.tokens) > 2 for client in world.clients.values()))
    for source, target in (("w0", "w1"), ("w1", "w2"), ("w2", "w0")):
        world.ship(source, target)
    world.finish()
    assert sum(client.moves for client in world.clients.values()) >= 5
