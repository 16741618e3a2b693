"""Assignment of the roles prefill, decode and mixed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random

import pytest

from services.common.device_profile import load_profile
from services.core.demand import ModelDemand
from services.core.overload.events import GroupUse, MemberUse, ModelLoad, ReportStatus
from services.core.overload.role_need import LOAD_KEPT_MAX, LOAD_MAX, RoleNeed, need_of
from services.core.overload.role_peers import PEERS_MAX
from services.core.overload.roles import (
    DWELL_S,
    QUEUED_S,
    SILENT_S,
    RoleAssigner,
    RolesDue,
    RoleSetting,
    alike,
    chosen,
    wanted_prefill,
)
from services.core.overload.worker_facts import WorkerFacts
from services.core.role import Role

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED
COSTS = load_profile("A100-14B").model
CALM = ModelLoad(0, 0, 1000, 1000, 0, 0, 0, 0, 0)
FIXED, AUTO = RoleSetting(prefill=1, decode=1), RoleSetting(auto=True)


def use(name: str, **changes: object) -> GroupUse:
    member = MemberUse(name, 200_000, 20_000, 200_000)
    whole = GroupUse(f"group-{name}", "m", (member,), running=20, kv_layout="layout")
    return replace(whole, **changes)  # type: ignore[arg-type]


def silent(name: str) -> GroupUse:
    whole = GroupUse(f"group-{name}", "m", (), report_status=ReportStatus.SILENT)
    return replace(whole, silent_ids=(name,))


def facts(name: str, wish: Role = M, tokens: int = 2048) -> WorkerFacts:
    return WorkerFacts(
        *(name, "m", 16, 12_500, 10**9, None, ("host",)),
        role=wish,
        hands_over=True,
        cost_model=COSTS,
        max_batch_tokens=tokens,
    )


def demand(prompts: float = 3000.0, outputs: float = 500.0, **changes: object) -> ModelDemand:
    mix = ModelDemand("m", prompt_tokens_per_s=prompts, output_tokens_per_s=outputs, tpot_s=0.1)
    return replace(mix, **changes)  # type: ignore[arg-type]


@dataclass
class Leader:
    """A leading memory manager whose roles are written at once."""

    setting: RoleSetting
    workers: tuple[str, ...] = ("w0", "w1", "w2", "w3")
    now_s: float = 100.0
    present: dict[str, Role] = field(default_factory=dict)
    wishes: Mapping[str, Role] = field(default_factory=dict)
    tokens: int = 2048
    unable: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.assigner = RoleAssigner(self.setting)

    def __call__(
        self,
        after_s: float = 0.0,
        mix: ModelDemand | None = None,
        uses: list[GroupUse] | None = None,
        load: ModelLoad = CALM,
    ) -> dict[str, Role]:
        self.now_s += after_s
        uses = [use(name) for name in self.workers] if uses is None else uses
        of_workers = {
            name: replace(
                facts(name, self.wishes.get(name, M), self.tokens),
                hands_over=name not in self.unable,
            )
            for name in self.workers
        }
        demands = {} if mix is None else {"m": mix}
        due = RolesDue(
            self.now_s, tuple(uses), of_workers, {"m": load}, demands, dict(self.present)
        )
        self.present = self.assigner.assign(due)
        return self.present

    @property
    def prefill(self) -> int:
        return sum(role is P for role in self.present.values())


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("mixed", RoleSetting()),
        ("auto", AUTO),
        ("prefill=2,decode=3", RoleSetting(prefill=2, decode=3)),
    ],
)
def test_role_settings_are_parsed(text: str, setting: RoleSetting) -> None:
    assert RoleSetting.parse(text) == setting
    assert setting.off == (text == "mixed")


@pytest.mark.parametrize(
    "text", ["", "prefill", "prefill=1", "prefill=0,decode=1", "decode=1,prefill=1", "AUTO"]
)
def test_invalid_role_settings_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="mixed, auto or prefill=N,decode=M"):
        RoleSetting.parse(text)


def test_mixed_assigns_nothing() -> None:
    leader = Leader(RoleSetting(), present={"w0": P, "w1": D})
    assert leader(mix=demand()) == {}


def test_fixed_numbers_of_each_and_the_rest_mixed() -> None:
    assert Leader(FIXED)() == {"w0": P, "w1": D}
    assert Leader(RoleSetting(prefill=1, decode=3))() == {"w0": P, "w1": D, "w2": D, "w3": D}


def test_preferences_precede_current_roles() -> None:
    assert Leader(FIXED, wishes={"w0": D, "w3": P})() == {"w3": P, "w0": D}
    assert Leader(FIXED, present={"w2": P, "w1": D})() == {"w2": P, "w1": D}
    assert Leader(FIXED, present={"w2": P, "w1": D}, wishes={"w2": D})() == {"w0": P, "w2": D}


def test_the_loss_of_a_worker_changes_no_other_role_needlessly() -> None:
    leader = Leader(RoleSetting(prefill=1, decode=2))
    assert leader() == {"w0": P, "w1": D, "w2": D}
    leader.workers = ("w0", "w2", "w3")
    assert leader() == {"w0": P, "w2": D, "w3": D}
    leader.workers = ("w2", "w3")
    assert leader() == {"w2": P, "w3": D}
    leader.workers = ("w2",)
    assert leader() == {}


def test_too_few_workers_are_divided_proportionally() -> None:
    ids = ["w0", "w1", "w2", "w3"]
    for prefill, decode, expected in ((8, 8, 2), (1, 30, 1), (30, 1, 3), (4, 12, 1)):
        roles = chosen(ids, prefill, decode, {}, {})
        assert len(roles) == 4
        assert sum(role is P for role in roles.values()) == expected


def test_only_single_workers_with_the_same_layout_have_roles() -> None:
    pair = (*use("w0").members, *use("w1").members)
    merged = replace(use("w0"), members=pair, kv_layout="")
    leader = Leader(FIXED)
    assert leader(uses=[merged, use("w2"), use("w3")]) == {"w2": P, "w3": D}
    assert leader(uses=[use("w0"), use("w1", draining=True)]) == {}
    assert leader(uses=[use("w0", kv_layout=""), use("w1")]) == {}
    other = [use("w0", kv_layout="new"), use("w1"), use("w2")]
    assert leader(uses=other) == {"w1": P, "w2": D}
    known = {name: facts(name) for name in leader.workers}
    assert [group.worker_ids for group in alike(other, known)] == [("w1",), ("w2",)]


def test_workers_that_hand_over_nothing_are_mixed() -> None:
    """Those without a prefix cache, and those of an older release, also where they are most."""
    leader = Leader(FIXED, unable=("w0", "w3"))
    assert leader() == {"w1": P, "w2": D}
    assert Leader(FIXED, unable=("w0", "w1", "w2"))() == {}
    old = [use(name, kv_layout="old") for name in ("w0", "w1", "w2")]
    new = [use(name, kv_layout="new") for name in ("w3", "w4")]
    upgraded = Leader(FIXED, ("w0", "w1", "w2", "w3", "w4"), unable=("w0", "w1", "w2"))
    assert upgraded(uses=[*old, *new]) == {"w3": P, "w4": D}


def test_a_new_leader_changes_nothing_before_the_workers_report() -> None:
    before = {"w1": P, "w0": D}
    leader = Leader(FIXED, ("w0", "w1"), present=before)
    unknown = [silent("w0"), silent("w1")]
    assert leader(uses=unknown) == before
    assert leader(1.0, uses=[use("w0"), silent("w1")]) == before
    assert leader(1.0) == before
    # A worker that stays silent loses its role.
    assert leader(0.0, uses=[use("w0"), silent("w1")]) == before
    assert leader(SILENT_S, uses=[use("w0"), silent("w1")]) == {}


@pytest.mark.parametrize("setting", [FIXED, AUTO])
@pytest.mark.parametrize("cause", ["queue", "refusals", "short"])
def test_an_overload_ends_all_roles_and_calm_restores_them(
    setting: RoleSetting, cause: str
) -> None:
    leader = Leader(setting)
    roles = leader(mix=demand())
    assert set(roles.values()) == {P, D}
    over = {
        "queue": {"mix": demand(queued=3)},
        "refusals": {"mix": demand(refused=1)},
        "short": {"mix": demand(), "load": replace(CALM, stuck_tokens=5)},
    }[cause]
    if cause == "queue":  # a short queue is none
        assert leader(1.0, **over) == roles  # type: ignore[arg-type]
        assert leader(QUEUED_S, **over) == {}  # type: ignore[arg-type]
    else:
        assert leader(1.0, **over) == {}  # type: ignore[arg-type]
    assert leader(DWELL_S - 0.1, mix=demand()) == {}
    assert set(leader(0.2, mix=demand()).values()) == {P, D}


def test_auto_needs_targets_that_mixed_workers_miss() -> None:
    assert Leader(AUTO)(mix=demand(tpot_s=0.0)) == {}
    assert Leader(AUTO)(mix=demand(tpot_s=1.0)) == {}
    assert Leader(AUTO, tokens=256)(mix=demand()) == {}
    assert Leader(AUTO)(mix=demand(prompts=0.0)) == {}
    assert set(Leader(AUTO)(mix=demand()).values()) == {P, D}


def test_auto_follows_the_mix_of_prompts_and_answers() -> None:
    heavy, light = demand(14_000.0, 500.0), demand(2000.0, 5000.0)
    leader, other = Leader(AUTO), Leader(AUTO)
    leader(mix=heavy)
    other(mix=light)
    assert (leader.prefill, other.prefill) == (3, 1)


def test_auto_stays_mixed_if_a_side_could_not_carry_its_load() -> None:
    assert Leader(AUTO, ("w0", "w1"))(mix=demand(6500.0, 100.0)) == {}
    need = RoleNeed(LOAD_MAX + 0.05, 0.1, 2.0)
    assert wanted_prefill(need, 2, 0) == 0
    assert wanted_prefill(need, 2, 1) == 1
    assert wanted_prefill(replace(need, prompts=LOAD_KEPT_MAX + 0.05), 2, 1) == 0


def test_auto_changes_a_single_worker_at_a_time_with_pauses() -> None:
    leader = Leader(AUTO, tuple(f"w{number}" for number in range(8)))
    leader(mix=demand(1000.0, 6000.0))
    assert leader.prefill == 1
    counts = []
    for _ in range(200):
        leader(1.0, mix=demand(25_000.0, 1000.0))
        counts.append(leader.prefill)
    steps = [index for index, count in enumerate(counts[1:], 1) if count != counts[index - 1]]
    assert counts[-1] > 4
    assert all(abs(counts[index] - counts[index - 1]) == 1 for index in steps)
    assert all(later - sooner >= DWELL_S for sooner, later in pairwise(steps))


def test_hysteresis_keeps_the_number_near_a_boundary() -> None:
    """A need of 1.4 to 1.6 workers of four changes nothing either way."""
    for present in (1, 2):
        for share in (0.36, 0.39, 0.41):
            need = RoleNeed(2 * share, 2 * (1 - share), 2.0)
            assert wanted_prefill(need, 4, present) == present
    assert wanted_prefill(RoleNeed(1.0, 1.0, 2.0), 4, 1) == 2


def test_a_new_leader_of_auto_goes_on_with_the_present_roles() -> None:
    leader = Leader(AUTO)
    roles = leader(mix=demand(14_000.0, 500.0))
    successor = Leader(AUTO, present=dict(roles))
    assert successor(mix=demand(12_500.0, 500.0)) == roles


@pytest.mark.parametrize("turns", [0, 1])
def test_a_new_leader_pauses_after_it_ends_roles(turns: int) -> None:
    """Even if the only prefill worker can hand over nothing in that round."""
    leader, light = Leader(AUTO), demand(2000.0, 5000.0)
    roles = leader(mix=light)
    (gone,) = (name for name, role in roles.items() if role is P)
    uses = [use(name, kv_layout="" if name == gone else "layout") for name in leader.workers]
    successor = Leader(AUTO, present=dict(roles))
    for _ in range(turns):
        assert successor(1.0, mix=light) == roles
    assert successor(1.0, mix=demand(tpot_s=0.0), uses=uses) == {}
    assert successor(DWELL_S - 0.1, mix=light) == {}
    assert set(successor(0.2, mix=light).values()) == {P, D}


def test_the_need_of_more_prompts_is_larger() -> None:
    uses = [use("w0"), use("w1")]
    few, many = (need_of(demand(tokens), uses, COSTS, 2048) for tokens in (1000.0, 4000.0))
    assert many.prompts == pytest.approx(4 * few.prompts)
    assert many.answers == few.answers > 0
    tight = need_of(demand(tpot_s=0.03), uses, COSTS, 2048)
    assert tight.answers > few.answers  # fewer requests decode at a time
    assert tight.tightness > few.tightness > 1


@pytest.mark.parametrize("setting", [AUTO, RoleSetting(prefill=40, decode=90)])
def test_every_prefill_worker_can_be_connected_to_every_decode_worker(
    setting: RoleSetting,
) -> None:
    leader = Leader(setting, tuple(f"w{number:03}" for number in range(200)))
    roles = list(leader(mix=demand(prompts=400_000.0, outputs=100_000.0)).values())
    assert 0 < roles.count(P) <= PEERS_MAX
    assert roles.count(D) == PEERS_MAX


@pytest.mark.parametrize("seed", range(60))
def test_random_events_keep_roles_within_bounds(seed: int) -> None:
    """Both roles or none, single workers only, and no alternation."""
    rng = Random(seed)
    names = tuple(f"w{number}" for number in range(rng.randrange(2, 8)))
    setting = rng.choice([AUTO, AUTO, RoleSetting(prefill=rng.randrange(1, 4), decode=2)])
    leader = Leader(setting, names, wishes={name: rng.choice(list(Role)) for name in names})
    last_s = -1e9
    for _ in range(300):
        before = dict(leader.present)
        uses = [
            rng.choice([use(name)] * 30 + [silent(name), use(name, kv_layout="")])
            for name in names
            if rng.random() < 0.98
        ] or [use(names[0])]
        mix = demand(rng.uniform(0, 20_000), rng.uniform(0, 8000), tpot_s=rng.choice([0.1, 0.05]))
        mix = replace(mix, queued=rng.choice([0] * 9 + [1]))
        roles = leader(rng.choice([0.5, 0.5, 3.0]), mix=mix, uses=uses)
        able = {name for group in uses for name in group.worker_ids}
        assert roles.keys() <= able
        assert not roles or set(roles.values()) == {P, D}
        entered = bool(roles) and not before
        assert not entered or leader.now_s - last_s >= DWELL_S or setting is not AUTO
        # Roles that end only until a worker reports return at once.
        if before and not roles and not any(group.silent_ids for group in uses):
            last_s = leader.now_s
        if rng.random() < 0.03:  # a successor takes over, and knows of no earlier change
            leader.assigner = RoleAssigner(setting)
            last_s = -1e9
