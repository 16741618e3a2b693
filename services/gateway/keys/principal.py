"""The principal of a request: its owner and rights, by its key."""

from dataclasses import dataclass

from services.core.quota.limits import NO_LIMITS, QuotaLimits
from services.gateway.vocabulary.errors import Forbidden


@dataclass(frozen=True, slots=True)
class Principal:
    """The bearer of a key. `models`: those that it may use, None: all. `key_id` is no secret."""

    owner: str = ""
    admin: bool = False
    models: frozenset[str] | None = None
    limits: QuotaLimits = NO_LIMITS
    key_id: str = ""

    @property
    def is_operator(self) -> bool:
        """Whether the bearer may see figures of all owners, such as metrics."""
        return self.admin or not self.owner

    def may_use(self, *names: str) -> bool:
        """Whether requests to the model that goes by these names are allowed."""
        return self.models is None or not self.models.isdisjoint(names)

    def check_model(self, *names: str) -> None:
        """Raise Forbidden unless requests to the model that goes by these names are allowed."""
        if not self.may_use(*names):
            raise Forbidden(
                f"this key may not use the model {names[0][:128]!a}; ask for one that may",
                param="model",
            )


ANYONE = Principal()
"""The principal of all clients where no key is asked for."""
