"""The models that the gateway serves, and which of them a request names."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from services.core.adapter import Adapter
from services.gateway.keys.principal import Principal
from services.gateway.model.served_model import ServedModel
from services.gateway.serving.choice_runner import ChoiceRunner
from services.gateway.serving.prepare import Preparer
from services.gateway.vocabulary.errors import MODELS_NAMED, no_such_model


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A served model or an adapter of it, with what prepares and runs its requests.

    `quota_weight`: tokens of a quota that a token of the model costs.
    """

    served: ServedModel
    preparer: Preparer
    choices: ChoiceRunner
    quota_weight: float = 1.0
    adapter: Adapter | None = None

    @property
    def root(self) -> str:
        """The folder of the adapter; without one, the model's name."""
        return self.name if self.adapter is None else self.adapter.source

    @property
    def parent(self) -> str | None:
        """The name of the adapter's model; None without an adapter."""
        return None if self.adapter is None else self.name

    def with_adapter(self, adapter: Adapter) -> "ModelEntry":
        """The entry of an adapter of the model."""
        return replace(self, adapter=adapter, preparer=self.preparer.with_adapter(adapter))

    @property
    def name(self) -> str:
        """The model's name at the scheduler and the workers."""
        return self.served.name

    @property
    def max_model_len(self) -> int:
        """Longest sequence, in tokens, of any worker now; of the model before the first worker."""
        return self.preparer.max_model_len()


class Adapters(Protocol):
    """The adapters of all models."""

    def adapter(self, name: str) -> tuple[str, Adapter] | None:
        """The name of an adapter's model, and the adapter; None if there is none."""

    def names(self) -> Sequence[str]:
        """The names of all adapters."""


class ModelRegistry:
    """Resolves names of models, aliases and adapters included, for the key of a request."""

    def __init__(self, entries: Sequence[ModelEntry], adapters: Adapters | None = None) -> None:
        """`entries` have no name or alias in common."""
        self.entries = tuple(entries)
        self._adapters = adapters
        self._by_name = {name: entry for entry in entries for name in entry.served.names}

    @property
    def only(self) -> ModelEntry | None:
        """The model if the gateway serves a single one."""
        return self.entries[0] if len(self.entries) == 1 else None

    def find(self, name: str) -> ModelEntry | None:
        """The model or adapter with this name or alias; None if there is none. Checks no key."""
        # A model that is configured later takes the name of an adapter.
        return self._by_name.get(name) or self._adapter_entry(name)

    def entry(self, name: str, principal: Principal) -> ModelEntry:
        """The model with this name or alias.

        Raises:
            NoSuchModel: if there is none. Also if `principal` may use other models only, as a key
                must not reveal what else is served.
            Forbidden: if `principal` may use none of the gateway's models, whether or not there is
                one with this name, or may use this one by another name only.
        """
        entry = self.find(name)
        if entry is not None and _may_use(name, entry, principal):
            principal.check_model(name, entry.name)
            return entry
        listed = self.listed(principal)
        if not listed:
            # An unknown name, too: the error must not reveal which names there are.
            principal.check_model(name)
        raise no_such_model(name, *listed)

    def allowed_entry(self, name: str, principal: Principal) -> ModelEntry | None:
        """The model with this name or alias if `principal` may use it by this name, else None."""
        entry = self.find(name)
        if entry is None or not principal.may_use(name, entry.name):
            return None
        return entry

    def allowed(self, principal: Principal) -> Iterator[tuple[str, ModelEntry]]:
        """The names that `principal` may use, with their models; each model's own name first."""
        for entry in self.entries:
            for name in entry.served.allowed_names(principal):
                yield name, entry
        for name in () if self._adapters is None else self._adapters.names():
            adapter = None if name in self._by_name else self._adapter_entry(name)
            if adapter is not None and _may_use(name, adapter, principal):
                yield name, adapter

    def _adapter_entry(self, name: str) -> ModelEntry | None:
        known = None if self._adapters is None else self._adapters.adapter(name)
        if known is None:
            return None
        base, adapter = known
        entry = self._by_name.get(base)
        # A gateway serves only adapters of its own models.
        return None if entry is None or entry.name != base else entry.with_adapter(adapter)

    def listed(self, principal: Principal) -> list[str]:
        """A name of each model that `principal` may use, for errors; of adapters without one."""
        names = (entry.served.allowed_names(principal) for entry in self.entries)
        models = [allowed[0] for allowed in names if allowed]
        # Not all: there may be many adapters.
        return models or [name for name, _ in islice(self.allowed(principal), MODELS_NAMED + 1)]


def _may_use(name: str, entry: ModelEntry, principal: Principal) -> bool:
    """Whether `principal` may use some name of a model, or an adapter by its name or its model."""
    if entry.adapter is not None:
        return principal.may_use(name, entry.name)
    return bool(entry.served.allowed_names(principal))
