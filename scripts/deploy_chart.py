"""The Helm chart, made from the kustomizations: one source, so that the two cannot drift apart.

Each template is the union of an object's variants (see `VARIANTS`): what only some of them have
stands between {{- if }} and {{- end }}. The fields that deploy/helm/parameters.yaml names become
values, whose defaults are what the manifests say.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy_objects import Object, Variant, identity

CPU = Variant()
GPU = Variant(device="gpu")
FEATURES = ("monitoring", "keda", "tls", "cert-manager", "etcd-credentials", "api-keys")
VARIANTS = (
    CPU,
    GPU,
    Variant(etcd=False),
    *(Variant(features=frozenset({name})) for name in FEATURES),
    Variant(etcd=False, features=frozenset({"tls"})),
)
# Names of values: a hyphen would have to be quoted in every expression.
VALUE_OF = {
    "cert-manager": "certManager",
    "etcd-credentials": "etcdCredentials",
    "api-keys": "apiKeys",
}

IMAGE = re.compile(r"(?P<name>[a-z-]+):(?P<tag>[0-9.]+)(?P<flavour>-[a-z]+)?")

MISSING: Any = object()
Values = Mapping[Variant, Any]


@dataclass(frozen=True, slots=True)
class Condition:
    """When a part of a template is rendered."""

    expression: str
    holds: Callable[[Variant], bool]


def conditions() -> Iterator[Condition]:
    """All that parts may depend on, simple ones first."""
    yield Condition('eq .Values.device "cpu"', lambda variant: variant.device == "cpu")
    yield Condition('eq .Values.device "gpu"', lambda variant: variant.device == "gpu")
    for feature in ("etcd", *FEATURES):
        value = f".Values.{VALUE_OF.get(feature, feature)}.enabled"
        yield Condition(value, lambda variant, feature=feature: variant.has(feature))  # type: ignore[misc]
        yield Condition(
            f"not {value}",
            lambda variant, feature=feature: not variant.has(feature),  # type: ignore[misc]
        )


def condition_of(present: Iterable[Variant], among: Iterable[Variant]) -> str:
    """The expression that is true for those `present` alone; "" if they are all.

    Raises:
        ValueError: if no expression says that.
    """
    wanted, among = set(present), list(among)
    if wanted == set(among):
        return ""
    for condition in conditions():
        if {variant for variant in among if condition.holds(variant)} == wanted:
            return condition.expression
    names = ", ".join(sorted(variant.name for variant in wanted))
    raise ValueError(f"no value of the chart tells these variants from the others: {names}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands: in the field `path` of an object, after `prefix`, or `plus` more."""

    path: str
    prefix: str = ""
    plus: int = 0

    def value_of(self, field: Any, kind: str) -> Any:
        """The value of type `kind` (of JSON schema) that makes the field what it is.

        Raises:
            ValueError: if none does.
        """
        if self.prefix:
            if not field.startswith(self.prefix):
                raise ValueError(f"{self.path} does not begin with {self.prefix}")
            return field.removeprefix(self.prefix)
        if kind == "integer":
            return int(field) - self.plus
        return field

    def expression(self, value: str, field: Any, kind: str) -> str:
        """What fills the field from the value, as JSON of the type that the field has."""
        if self.prefix:
            return f'{{{{ printf "{self.prefix}%v" {value} | toJson }}}}'
        if self.plus:
            return f"{{{{ add {self.plus} {value} }}}}"
        if kind == "integer" and isinstance(field, str):
            return f"{{{{ toString {value} | toJson }}}}"
        return f"{{{{ toJson {value} }}}}"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A value of the chart; `optional`: the field is left out while the value is empty."""

    value: str
    help: str
    schema: Mapping[str, Any]
    places: Sequence[Place]
    optional: bool = False

    @property
    def empty(self) -> Any:
        """The value that leaves its field out, or adds nothing to it."""
        return {"array": [], "object": {}, "string": ""}[self.schema["type"]]


def parse_parameters(rows: Iterable[Mapping[str, Any]]) -> list[Parameter]:
    """The parameters in deploy/helm/parameters.yaml; `each` stands for one row per service."""
    parameters = []
    for row in rows:
        for service in row.get("each", [""]):

            def filled(text: str, service: str = service) -> str:
                return text.replace("SERVICE", service)

            places = [
                Place(filled(place["at"]), place.get("prefix", ""), place.get("plus", 0))
                for place in (row["at"] if isinstance(row["at"], list) else [{"at": row["at"]}])
            ]
            parameters.append(
                Parameter(
                    filled(row["value"]),
                    filled(row["help"]),
                    row["schema"],
                    places,
                    row.get("optional", False),
                )
            )
    return parameters


def children(parent: str, keys: Iterable[Any]) -> list[str]:
    """Paths of the fields `keys` of the mapping at `parent`."""
    return [f"{parent}:{key}" if ":" not in parent else f"{parent}.{key}" for key in keys]


def merged_order(orders: Iterable[Sequence[str]]) -> list[str]:
    """All names, each after the one that precedes it where it is first seen."""
    merged: list[str] = []
    for order in orders:
        after = 0
        for name in order:
            if name in merged:
                after = merged.index(name) + 1
            else:
                merged.insert(after, name)
                after += 1
    return merged


def item_key(item: Any) -> str:
    """What identifies an item of a list among the variants of the list."""
    if isinstance(item, dict):
        for named in (item, item.get("metadata", {})):
            for field in ("mountPath", "name"):
                if field in named:
                    return str(named[field])
    return json.dumps(item, sort_keys=True)


class Templates:
    """Writes templates and remembers which parameters it has placed."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._at = {
            place.path: (parameter, place) for parameter in parameters for place in parameter.places
        }
        self._placed: dict[str, dict[Variant, Any]] = {}
        self._parameters = parameters

    def object(self, versions: Mapping[Variant, Object], among: Sequence[Variant]) -> str:
        """The template of one object, of which `versions` has those variants that have it."""
        first = next(iter(versions.values()))
        lines = ["---", *self._mapping(identity(first), versions, 0)]
        return "\n".join(_guarded(condition_of(versions, among), lines)) + "\n"

    def defaults(self, variant: Variant) -> dict[str, Any]:
        """The value of each parameter that makes the chart render `variant`.

        Raises:
            ValueError: if a parameter has no field in the manifests.
        """
        found = {}
        for parameter in self._parameters:
            values = self._placed.get(parameter.value, {})
            if variant in values:
                found[parameter.value] = values[variant]
            elif parameter.optional or parameter.places[0].path.endswith("[+]"):
                found[parameter.value] = parameter.empty
            elif values:
                found[parameter.value] = next(iter(values.values()))
            else:
                raise ValueError(f"parameter {parameter.value} names no field of the manifests")
        return found

    def _mapping(self, path: str, versions: Values, indent: int) -> list[str]:
        keys = merged_order([list(version) for version in versions.values()])
        paths = dict(zip(keys, children(path, keys), strict=True))
        lines: list[str] = []
        for key in keys:
            having = {v: version[key] for v, version in versions.items() if key in version}
            lines += self._field(paths[key], key, having, list(versions), indent)
        for at, (parameter, _) in self._at.items():
            parent, _, key = at.rpartition("." if "." in at.partition(":")[2] else ":")
            if parent == path and key not in keys and parameter.optional:
                lines += self._optional(parameter, key, indent)
        return lines + self._more(path, "{{ $key }}: {{ toJson $one }}", indent)

    def _more(self, path: str, line: str, indent: int) -> list[str]:
        """What a value adds to the mapping or list at `path`."""
        placed = self._at.get(f"{path}[+]")
        if placed is None:
            return []
        value = placed[0].value
        self._placed.setdefault(value, {})
        begin = f"{{{{- range $key, $one := .Values.{value} }}}}"
        return [begin, f"{' ' * indent}{line}", "{{- end }}"]

    def _field(
        self, path: str, key: str, having: Values, among: Sequence[Variant], indent: int
    ) -> list[str]:
        placed = self._at.get(path)
        if placed is not None:
            parameter, place = placed
            self._note(parameter, place, having)
            if parameter.optional:
                return self._optional(parameter, key, indent)
            kind = parameter.schema["type"]
            field = next(iter(having.values()))
            expression = place.expression(f".Values.{parameter.value}", field, kind)
            lines = [f"{' ' * indent}{key}: {expression}"]
        else:
            lines = self._value(path, key, having, indent)
        return _guarded(condition_of(having, among), lines)

    def _optional(self, parameter: Parameter, key: str, indent: int) -> list[str]:
        line = f"{' ' * indent}{key}: {{{{ toJson . }}}}"
        return [f"{{{{- with .Values.{parameter.value} }}}}", line, "{{- end }}"]

    def _note(self, parameter: Parameter, place: Place, having: Values) -> None:
        noted = self._placed.setdefault(parameter.value, {})
        for variant, field in having.items():
            value = place.value_of(field, parameter.schema["type"])
            if noted.setdefault(variant, value) != value:
                raise ValueError(f"{parameter.value} is {noted[variant]} and {value} in one set")

    def _value(self, path: str, key: str, having: Values, indent: int) -> list[str]:
        space = " " * indent
        kinds = {type(value) for value in having.values()}
        if kinds == {dict} and any(having.values()):
            return [f"{space}{key}:", *self._mapping(path, having, indent + 2)]
        if kinds == {list} and any(having.values()):
            return [f"{space}{key}:", *self._list(path, having, indent)]
        return _alternatives(having, lambda value: [f"{space}{key}: {_scalar(key, value)}"])

    def _list(self, path: str, versions: Values, indent: int) -> list[str]:
        keyed = {v: {item_key(item): item for item in items} for v, items in versions.items()}
        lines: list[str] = []
        for name in merged_order([list(items) for items in keyed.values()]):
            having = {v: items[name] for v, items in keyed.items() if name in items}
            if all(isinstance(item, dict) for item in having.values()):
                item = self._mapping(f"{path}[{name}]", having, indent + 2)
                item = _dashed(item, indent)
            else:
                item = [f"{' ' * indent}- {_scalar('', next(iter(having.values())))}"]
            lines += _guarded(condition_of(having, versions), item)
        return lines + self._more(path, "- {{ toJson $one }}", indent)


def _dashed(lines: list[str], indent: int) -> list[str]:
    """The fields of a mapping as an item of a list; its first field stands beside the dash."""
    first = next(i for i, line in enumerate(lines) if not line.startswith("{{-"))
    if first:
        # A conditional field stands first: the dash needs a line of its own.
        return [f"{' ' * indent}-", *lines]
    return [f"{' ' * indent}- {lines[0][indent + 2 :]}", *lines[1:]]


def _guarded(expression: str, lines: list[str]) -> list[str]:
    return [f"{{{{- if {expression} }}}}", *lines, "{{- end }}"] if expression else lines


def _alternatives(having: Values, lines_of: Callable[[Any], list[str]]) -> list[str]:
    """Each different value, with the condition under which it is the one."""
    groups: dict[str, list[Variant]] = {}
    for variant, value in having.items():
        groups.setdefault(json.dumps(value, sort_keys=True), []).append(variant)
    lines: list[str] = []
    for variants in groups.values():
        lines += _guarded(condition_of(variants, having), lines_of(having[variants[0]]))
    return lines


def _scalar(key: str, value: Any) -> str:
    image = IMAGE.fullmatch(value) if key == "image" else None
    if image is not None:
        form = f"%s{image['name']}:%s{image['flavour'] or ''}"
        return f'{{{{ printf "{form}" .Values.image.registry .Values.image.tag | toJson }}}}'
    text = json.dumps(value)
    return f"{{{{ toJson {text} }}}}" if "{{" in text else text
