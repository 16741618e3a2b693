"""Diagrams show every state and every transition of their tables."""

import re

import state_diagrams


def test_every_state_and_transition_is_drawn() -> None:
    for machine in state_diagrams.MACHINES:
        drawn = set(re.findall(r"^    (\w+) --> (\w+)$", state_diagrams.diagram(machine), re.M))
        assert drawn == {(source.name, target.name) for source, target in machine.transitions}
        assert set(machine.meanings) == set(type(machine.initial))
        assert f"| {machine.initial.name} | " in state_diagrams.page()


def test_final_states_lead_to_the_end() -> None:
    (machine,) = [
        machine for machine in state_diagrams.MACHINES if machine.initial.name == "WAITING"
    ]
    lines = state_diagrams.diagram(machine).splitlines()
    assert [line for line in lines if line.endswith("--> [*]")] == ["    ENDED --> [*]"]
    assert "    [*] --> WAITING" in lines
