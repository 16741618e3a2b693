"""Which layers each stage of a pipeline runs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """A member runs layers `first_layer` to `end_layer` - 1."""

    worker_id: str
    first_layer: int
    end_layer: int

    @property
    def num_layers(self) -> int:
        """How many layers the stage runs; at least one."""
        return self.end_layer - self.first_layer
