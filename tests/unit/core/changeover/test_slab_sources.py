"""A slab is restored from its best source, and from another after a failure."""

import random
from collections.abc import Callable

import pytest

from services.core.changeover import slab_sources, vocabulary
from services.core.changeover.slab_sources import (
    COPY,
    FAILURES_MAX,
    FOLDER,
    SlabSource,
    SlabSources,
)
from tests.support.changeover_scenes import restoring
from tests.support.changeover_script import LAYERS, groups

B, C = SlabSource("b"), SlabSource("c")
SLABS = [f"model.layers.{index}" for index in range(6)]
ALL = frozenset(SLABS)


def next_of(slabs: SlabSources, *, intact: bool) -> SlabSource:
    """The source of the only slab in progress, which is then completed."""
    ((slab, source),) = slabs.start()
    assert slabs.end(slab, intact)
    return source


def test_sources_are_tried_in_order_after_failures() -> None:
    slabs = SlabSources(SLABS[:1], frozenset(SLABS), {"b": ALL, "c": ALL})
    assert [next_of(slabs, intact=False) for _ in range(4)] == [COPY, B, C, FOLDER]


def test_a_holder_that_fails_often_is_excluded() -> None:
    slabs = SlabSources(SLABS[:], holders={"b": ALL})
    sources_seen = []
    while not slabs.all_restored:
        ((slab, source),) = slabs.start()
        sources_seen.append(source)
        slabs.end(slab, source == FOLDER)
    assert sources_seen.count(B) == FAILURES_MAX and sources_seen.count(FOLDER) == len(SLABS)


def test_slabs_come_from_several_holders_at_the_same_time() -> None:
    slabs = SlabSources(SLABS[:], holders={"b": ALL, "c": ALL}, at_once=4)
    assert list(slabs.start()) == [
        *[(SLABS[0], B), (SLABS[1], C)],
        *[(SLABS[2], B), (SLABS[3], C)],
    ]
    assert not list(slabs.start()), "four are in progress"
    assert slabs.end(SLABS[3], True)
    assert list(slabs.start()) == [(SLABS[4], C)], "b sends two, c only one"


def test_the_folder_is_read_beside_a_busy_holder() -> None:
    holders = {"b": frozenset(SLABS[:2])}
    slabs = SlabSources(SLABS[:], holders=holders, at_once=6)
    assert list(slabs.start()) == [(SLABS[0], B), (SLABS[1], B), (SLABS[2], FOLDER)]


def test_an_unknown_slab_is_ignored() -> None:
    slabs = SlabSources(SLABS[:1])
    assert not slabs.end(SLABS[0], True) and not slabs.all_restored


def test_all_slabs_are_restored_despite_failures() -> None:
    for seed in range(500):
        rng = random.Random(seed)
        copied = frozenset(rng.sample(SLABS, rng.randint(0, 6)))
        holders = {
            name: frozenset(rng.sample(SLABS, rng.randint(0, 6)))
            for name in rng.sample("bcd", rng.randint(0, 3))
        }
        slabs = SlabSources(SLABS[:], copied, holders, rng.randint(1, 6))
        running: dict[str, SlabSource] = {}
        tried: set[tuple[str, SlabSource]] = set()
        restored = []
        while not slabs.all_restored:
            for slab, source in slabs.start():
                assert slab not in running and (slab, source) not in tried
                better = [COPY] if slab in copied else []
                if source == FOLDER:
                    failed = [name for name in holders if slab in holders[name]]
                    for name in failed:
                        spent = sum(source.holder == name for _, source in tried) >= FAILURES_MAX
                        assert spent or (slab, SlabSource(name)) in tried
                assert source == COPY or all((slab, source) in tried for source in better)
                running[slab] = source
            assert running, "nothing is in progress, and slabs are missing"
            assert len(running) <= slabs.at_once
            used = list(running.values())
            assert used.count(FOLDER) <= 1 and used.count(COPY) <= 1
            slab = rng.choice(sorted(running))
            source = running.pop(slab)
            intact = source == FOLDER or rng.random() < 0.5
            if intact:
                restored.append(slab)
            else:
                tried.add((slab, source))
            assert slabs.end(slab, intact)
        assert sorted(restored) == sorted(SLABS)


def test_a_damaged_slab_is_restored_again_before_the_change() -> None:
    script = restoring("a", "b")
    damaged = set[tuple[str, str]]()
    while script.steps:
        name, step = next(iter(script.steps.items()))
        slab = (name, step.slab if isinstance(step, vocabulary.RestoreSlab) else "")
        script.go_on(name, intact=not slab[1] or slab in damaged)
        damaged.add(slab)
        script.settle()
    script.change(groups(3, "a", "b"))
    for memory in script.memories.values():
        assert memory.layers == range(LAYERS)
        memory.check_invariants()


def _is_always_intact(patch: pytest.MonkeyPatch) -> None:
    end = SlabSources.end
    patch.setattr(SlabSources, "end", lambda self, slab, _intact: end(self, slab, True))


RULES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = {
    "a member is ready once all slabs are restored": (
        lambda patch: patch.setattr(SlabSources, "all_restored", property(lambda _: True)),
        test_a_damaged_slab_is_restored_again_before_the_change,
    ),
    "a damaged slab is missing": (
        _is_always_intact,
        test_a_damaged_slab_is_restored_again_before_the_change,
    ),
    "another source follows": (_is_always_intact, test_sources_are_tried_in_order_after_failures),
    "a holder has a limit of failures": (
        lambda patch: patch.setattr(slab_sources, "FAILURES_MAX", len(SLABS) + 1),
        test_a_holder_that_fails_often_is_excluded,
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remove, witness = RULES[rule]
    remove(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        witness()
