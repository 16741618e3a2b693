"""The principal of a request: the owner (tenant) and the permissions of its API key."""

from dataclasses import dataclass

from services.core.quota.limits import NO_LIMITS, QuotaLimits
from services.gateway.vocabulary.errors import Forbidden


@dataclass(frozen=True, slots=True)
class Principal:
    """The bearer of a key. `models`: the permitted models, None: all. `key_id` is not secret."""

    owner: str = ""
    admin: bool = False
    models: frozenset[str] | None = None
    limits: QuotaLimits = NO_LIMITS
    key_id: str = ""

    @property
    def is_operator(self) -> bool:
        """Whether the bearer may see data of all owners, such as metrics."""
        return self.admin or not self.owner

    def may_use(self, *names: str) -> bool:
        """Whether the bearer may use the model with these names."""
        return self.models is None or not self.models.isdisjoint(names)

    def check_model(self, *names: str) -> None:
        """Raise Forbidden unless the bearer may use the model with these names."""
        if not self.may_use(*names):
            raise Forbidden(
                f"this key may not use the model {names[0][:128]!a}; request another key",
                param="model",
            )


ANYONE = Principal()
"""The principal of clients that need no key, and of the key `api_key`, which has no owner."""
