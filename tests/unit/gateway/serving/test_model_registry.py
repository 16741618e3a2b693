"""Resolution of model names, and errors for models that the key may not use."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.core.adapter import Adapter
from services.gateway.keys.principal import ANYONE, Principal
from services.gateway.serving.model_registry import ModelEntry, ModelRegistry
from services.gateway.vocabulary.errors import Forbidden, NoSuchModel, no_such_model


def entry(name: str, *aliases: str) -> ModelEntry:
    names = (name, *aliases)

    def allowed(principal: Principal) -> tuple[str, ...]:
        return tuple(candidate for candidate in names if principal.may_use(candidate, name))

    served = SimpleNamespace(name=name, names=names, allowed_names=allowed)
    return ModelEntry(cast(Any, served), cast(Any, None), cast(Any, None))


M, N = entry("m", "x"), entry("n", "y")
BOTH, ONLY = ModelRegistry([M, N]), ModelRegistry([M])


def key(*models: str) -> Principal:
    return Principal("owner", models=frozenset(models))


@pytest.mark.parametrize(
    ("name", "principal", "expected"),
    [
        *((name, ANYONE, M) for name in ("m", "x")),
        *((name, ANYONE, N) for name in ("n", "y")),
        ("m", key("m"), M),
        ("x", key("m"), M),
        ("x", key("x"), M),
        ("y", key("m", "n"), N),
    ],
)
def test_names_and_aliases_are_resolved(
    name: str, principal: Principal, expected: ModelEntry
) -> None:
    assert BOTH.entry(name, principal) is expected


@pytest.mark.parametrize(
    ("name", "principal", "error", "message"),
    [
        ("z", ANYONE, NoSuchModel, "this server has 'm' and 'n'"),
        ("z", key("n"), NoSuchModel, "this server has 'n'$"),
        ("z", key("y"), NoSuchModel, "this server has 'y'$"),
        # The key lists it, but nothing has this name now.
        ("z", key("z"), NoSuchModel, "no model that this key may use"),
        # Another model does not exist for a key with a model of its own.
        ("m", key("n"), NoSuchModel, "'m' does not exist; this server has 'n'$"),
        ("x", key("n"), NoSuchModel, "'x' does not exist; this server has 'n'$"),
        # The key may use the model by its alias only, or none of the models.
        ("m", key("x"), Forbidden, "may not use the model 'm'"),
        ("m", key("other"), Forbidden, "^this key may not use the model 'm'; request"),
        # Whether or not there is such a model.
        ("z", key("other"), Forbidden, "^this key may not use the model 'z'; request"),
    ],
)
def test_unknown_names_are_refused(
    name: str, principal: Principal, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        BOTH.entry(name, principal)


def test_a_single_model_needs_no_name() -> None:
    assert ONLY.only is M and BOTH.only is None
    assert ONLY.find("x") is M and ONLY.find("n") is None


def test_model_names_are_limited_by_the_key() -> None:
    assert dict(BOTH.allowed(ANYONE)) == {"m": M, "x": M, "n": N, "y": N}
    assert dict(BOTH.allowed(key("n"))) == {"n": N, "y": N}
    assert not dict(BOTH.allowed(key("other")))


class Loaded:
    """Adapters of the model "m"."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def adapter(self, name: str) -> tuple[str, Adapter] | None:
        return ("m", Adapter(name, "0" * 64, "/a", 8)) if name in self._names else None

    def names(self) -> Sequence[str]:
        return self._names


def with_adapters(*names: str) -> ModelRegistry:
    preparer = SimpleNamespace(with_adapter=lambda _: preparer)
    return ModelRegistry([replace(M, preparer=cast(Any, preparer)), N], Loaded(*names))


def test_an_error_names_the_adapters_of_a_key_without_models() -> None:
    registry = with_adapters("t", "u")
    with pytest.raises(NoSuchModel, match=r"'z' does not exist; this server has 't'$"):
        registry.entry("z", key("t"))
    with pytest.raises(NoSuchModel, match=r"'u' does not exist; this server has 't'$"):
        registry.entry("u", key("t"))
    many = with_adapters(*map(str, range(20)))
    with pytest.raises(NoSuchModel, match=r"'7' and others, see /v1/models$"):
        many.entry("z", key(*map(str, range(20))))
    with pytest.raises(NoSuchModel, match=r"this server has 'm'$"):
        many.entry("z", key("m"))


def test_a_listed_name_is_allowed() -> None:
    registry = with_adapters("t", "u")
    keys = (ANYONE, *(key(name) for name in ("m", "x", "n", "y", "t", "other")))
    for principal in keys:
        names = dict(registry.allowed(principal))
        for name in ("m", "x", "n", "y", "t", "u", "z"):
            allowed = registry.allowed_entry(name, principal)
            assert allowed == names.get(name), (name, principal.models)


def test_an_error_names_few_models() -> None:
    names = [str(number) for number in range(20)]
    assert str(no_such_model("z", *names)).endswith("'6', '7' and others, see /v1/models")
