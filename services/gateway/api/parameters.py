"""Handles body fields that a Pydantic model lacks: ignored, unsupported, and unknown fields."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from services.gateway.vocabulary.errors import BadRequest, NotSupported

UNKNOWN_PARAMETER = "unknown_parameter"
NAMES_LISTED_MAX = 8
"""Maximum unknown fields in a warning."""
NAME_CHARS = 64
LIMITS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})
"""The names of the output limit in the various APIs."""
_SIMILAR = 0.8
"""Minimum similarity (difflib's ratio) of a misspelt name."""
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


@dataclass(frozen=True, slots=True)
class RefusedField:
    """An unsupported field. null and the `neutral` values request nothing and are accepted.

    `reason`: the reason, or an alternative, for error messages.
    """

    reason: str
    neutral: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """The fields that an endpoint ignores or refuses; further fields are unknown.

    `ignored`: fields without effect, whatever their value, with the reason. `limits`: the
    endpoint's names of the output limit, the preferred name first.
    """

    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, RefusedField] = field(default_factory=dict)
    limits: tuple[str, ...] = ()


_IGNORED = {
    "guided_decoding_backend": "there is a single backend",
    "guided_whitespace_pattern": "JSON is written without optional whitespace",
    "kv_transfer_params": "groups of workers transfer KV on their own",
    "metadata": "nothing is stored",
    "mm_processor_kwargs": "images are not supported",
    "nvext": "for another server",
    "prompt_cache_options": "prefixes are cached without it",
    "prompt_cache_retention": "a prefix stays cached while there is room",
    "safety_identifier": "it is not used",
    "spaces_between_special_tokens": "a tokenizer of this kind adds none",
    "store": "nothing is stored",
    "stream_interval": "tokens are sent as they arrive",
    "user": "it is not used",
    "vllm_xargs": "for extensions of another server",
}
_REFUSED = {
    "length_penalty": RefusedField("no beam search", (1, 1.0)),
    "logits_processors": RefusedField("the server runs no code of clients", ([],)),
    "logprob_token_ids": RefusedField("use top_logprobs", ([],)),
    "prompt_embeds": RefusedField("prompts are text or token ids"),
    "repetition_detection": RefusedField("use the penalties"),
    "thinking_token_budget": RefusedField("use max_tokens"),
    "use_beam_search": RefusedField("no beam search", (False,)),
}
CHAT = Policy(
    limits=("max_completion_tokens", "max_tokens"),
    ignored=_IGNORED | {"media_io_kwargs": "images are not supported"},
    refused=_REFUSED
    | {
        "audio": RefusedField("text only"),
        "chat_template": RefusedField("only the model's template is used"),
        "documents": RefusedField("put them into a message", ([],)),
        "echo": RefusedField("use /v1/completions", (False,)),
        "function_call": RefusedField("use tool_choice", ("none",)),
        "functions": RefusedField("use tools", ([],)),
        "modalities": RefusedField("text only", (["text"],)),
        "moderation": RefusedField("there is no moderation"),
        "prediction": RefusedField("no speculative decoding from client text"),
        "verbosity": RefusedField("ask for it in a message", ("medium",)),
        "web_search_options": RefusedField("there is no web search"),
    },
)
COMPLETION = Policy(
    limits=("max_tokens",),
    ignored=_IGNORED,
    refused=_REFUSED | {"suffix": RefusedField("no fill-in-the-middle", ("",))},
)


class UnknownFields:
    """Collects unknown fields of a body for a warning, or, if `refuse`, raises for the first."""

    def __init__(self, refuse: bool) -> None:
        self._refuse = refuse
        self._names: list[str] = []
        self._count = 0

    def add(self, name: str, inside: str = "", known: Collection[str] = ()) -> None:
        """Add the unknown field `name` of the object `inside`, whose fields are `known`.

        Raises:
            BadRequest: if unknown fields are refused.
        """
        if self._refuse:
            where = f" in '{inside}'" if inside else ""
            raise BadRequest(
                f"unknown parameter '{escaped_name(name)}'{where}{_suggestion(name, known)};"
                " correct its name or omit it",
                param=inside or escaped_name(name),
                code=UNKNOWN_PARAMETER,
            )
        self._count += 1
        if len(self._names) < NAMES_LISTED_MAX:
            path = f"{inside}.{name}" if inside else name
            # Warnings are sent as HTTP headers: replace all but plain characters.
            safe = "".join(c if c in _PLAIN else "?" for c in path[:NAME_CHARS])
            self._names.append(safe + _suggestion(name, known))

    def keep_known(
        self, data: Mapping[str, Any], known: Collection[str], inside: str
    ) -> dict[str, Any]:
        """Return the known fields of the object `inside`; adds the others."""
        for name in data:
            if name not in known:
                self.add(name, inside, known)
        return {name: value for name, value in data.items() if name in known}

    @property
    def warnings(self) -> tuple[str, ...]:
        """An ASCII sentence that lists the unknown fields; empty without any."""
        if not self._count:
            return ()
        more = self._count - len(self._names)
        names = ", ".join(self._names) + (f" and {more} more" if more else "")
        return (f"ignored unknown fields: {names}",)


def known_fields(
    data: Mapping[str, Any], fields: Collection[str], policy: Policy, unknown: UnknownFields
) -> dict[str, Any]:
    """Return the fields of `data` that the endpoint has, and add unknown fields to `unknown`.

    Raises:
        NotSupported: if an unsupported field has a value that requests something.
        BadRequest: if an unknown field is refused, or is another API's output limit.
    """
    kept = {}
    for name, value in data.items():
        if name in fields:
            kept[name] = value
        elif (refused := policy.refused.get(name)) is not None:
            if value is not None and not any(_same(value, none) for none in refused.neutral):
                raise NotSupported(
                    f"'{name}' with this value is not supported ({refused.reason}); omit it",
                    param=name,
                )
        elif name not in policy.ignored:
            _check_limit(name, data, policy)
            unknown.add(name, known=fields)
    return kept


def _check_limit(name: str, data: Mapping[str, Any], policy: Policy) -> None:
    """Refuse another API's output limit: without a limit, the output would fill the context."""
    # Some clients send all names. With a valid limit, the others count as unknown fields.
    missing = all(data.get(limit) is None for limit in policy.limits)
    if name in LIMITS and policy.limits and missing and data[name] is not None:
        raise BadRequest(
            f"'{name}' is called '{policy.limits[0]}' here; use that name",
            param=name,
            code=UNKNOWN_PARAMETER,
        )


def _suggestion(name: str, known: Collection[str]) -> str:
    """A hint at a known name that is similar to `name`; "" without any."""
    similar = get_close_matches(name[:NAME_CHARS].lower(), known, n=1, cutoff=_SIMILAR)
    return f" (did you mean '{similar[0]}'?)" if similar else ""


def escaped_name(name: str) -> str:
    """A client's field name, escaped and shortened for an error message."""
    return name[:NAME_CHARS].encode("ascii", "backslashreplace").decode()


def _same(value: Any, other: Any) -> bool:
    """Whether both are equal and of the same type: True is not 1."""
    return type(value) is type(other) and bool(value == other)
