"""The models that the gateway serves, and which of them a request names."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.gateway.keys.principal import Principal
from services.gateway.model.served_model import ServedModel
from services.gateway.serving.choice_runner import ChoiceRunner
from services.gateway.serving.prepare import Preparer
from services.gateway.vocabulary.errors import no_such_model


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A served model with what prepares and runs its requests.

    `quota_weight`: tokens of a quota that a token of the model costs.
    """

    served: ServedModel
    preparer: Preparer
    choices: ChoiceRunner
    quota_weight: float = 1.0

    @property
    def name(self) -> str:
        """The model's name at the scheduler and the workers."""
        return self.served.name

    @property
    def max_model_len(self) -> int:
        """Longest sequence, in tokens, of any worker now; of the model before the first worker."""
        return self.preparer.max_model_len()


class ModelRegistry:
    """Resolves names of models, aliases included, for the key of a request."""

    def __init__(self, entries: Sequence[ModelEntry]) -> None:
        """`entries` have no name or alias in common."""
        self.entries = tuple(entries)
        self._by_name = {name: entry for entry in entries for name in entry.served.names}

    @property
    def only(self) -> ModelEntry | None:
        """The model if the gateway serves a single one."""
        return self.entries[0] if len(self.entries) == 1 else None

    def find(self, name: str) -> ModelEntry | None:
        """The model with this name or alias; None if there is none. Checks no key."""
        return self._by_name.get(name)

    def entry(self, name: str, principal: Principal) -> ModelEntry:
        """The model with this name or alias.

        Raises:
            NoSuchModel: if there is none. Also if `principal` may use other models only, as a key
                must not reveal what else is served.
            Forbidden: if `principal` may use none of the gateway's models, or this one by another
                name only.
        """
        entry = self._by_name.get(name)
        allowed = [other for other, _ in self.allowed(principal)]
        if entry is None or (allowed and not entry.served.allowed_names(principal)):
            raise no_such_model(name, *self._listed(principal))
        principal.check_model(name, entry.name)
        return entry

    def allowed(self, principal: Principal) -> Iterator[tuple[str, ModelEntry]]:
        """The names that `principal` may use, with their models; each model's own name first."""
        for entry in self.entries:
            for name in entry.served.allowed_names(principal):
                yield name, entry

    def _listed(self, principal: Principal) -> list[str]:
        """The name of each model that `principal` may use."""
        names = (entry.served.allowed_names(principal) for entry in self.entries)
        return [allowed[0] for allowed in names if allowed]
