import pytest

from services.worker.engine.transfer.gate import ActivationGate


def test_it_is_busy_while_anybody_is_inside() -> None:
    gate = ActivationGate()
    clears: list[bool] = []
    gate.on_clear(lambda: clears.append(gate.busy))
    gate.enter()
    gate.enter()
    gate.leave()
    assert gate.busy and clears == []
    gate.leave()
    assert not gate.busy and clears == [False]


def test_nobody_leaves_who_has_not_entered() -> None:
    with pytest.raises(ValueError, match="without having entered"):
        ActivationGate().leave()
