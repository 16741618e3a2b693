"""An infeasible target is reported once, with both numbers."""

from services.core.cost.model import CostModel
from services.core.planner.infeasible_targets import REPORTED_MAX, InfeasibleTargets
from services.core.service import DEFAULT_SERVICE, Service, ServiceClass

MODEL = CostModel(alpha=0.0, beta=1e-3, gamma=0.011, lam=0.01)
"""A lone decode takes 12 ms."""


def promise(ttft_s: float | None, tpot_s: float | None) -> Service:
    return Service(ServiceClass.INTERACTIVE, ttft_s, tpot_s)


def test_each_class_and_value_is_reported_once_with_both_numbers() -> None:
    targets = InfeasibleTargets()
    (warning,) = targets.unreported(promise(0.5, 0.005), MODEL)
    assert "tpot_ms is 5 ms for a request of the class interactive" in str(warning)
    assert "takes 12 ms here" in str(warning)
    assert targets.unreported(promise(0.5, 0.005), MODEL) == []
    assert [target.name for target in targets.unreported(promise(0.004, 0.005), MODEL)] == [
        "ttft_ms"
    ]
    other = Service(ServiceClass.STANDARD, None, 0.005)
    assert [target.service_class for target in targets.unreported(other, MODEL)] == ["standard"]


def test_feasible_targets_are_not_reported() -> None:
    targets = InfeasibleTargets()
    assert targets.unreported(DEFAULT_SERVICE, MODEL) == []
    assert targets.unreported(promise(0.012, 0.012), MODEL) == []
    assert InfeasibleTargets().unreported(promise(0.001, 0.001), None) == []


def test_a_client_with_varying_targets_does_not_flood_the_log() -> None:
    targets = InfeasibleTargets()
    warnings = [
        target
        for step in range(500)
        for target in targets.unreported(promise(None, 1e-6 * (step + 1)), MODEL)
    ]
    assert len(warnings) == REPORTED_MAX
