"""Fields that the bodies of `requests` do not have: ignored, refused, or unknown."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from services.gateway.vocabulary.errors import BadRequest, NotSupported

UNKNOWN_PARAMETER = "unknown_parameter"
NAMES_SHOWN = 8
"""Unknown fields that a warning names."""
NAME_CHARS = 64
LIMITS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})
"""What the dialects call the most output tokens."""
_SIMILAR = 0.8
"""Names with at least this similarity (difflib's ratio) count as misspelt."""
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


@dataclass(frozen=True, slots=True)
class RefusedField:
    """A known field that is not served. Of its values, null and the `neutral` ones ask for nothing.

    `note`: why, or what to use instead; for people.
    """

    note: str
    neutral: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """What becomes of the fields that an endpoint's body does not have; others are unknown.

    `ignored` are those that change nothing here, whatever their value, with the reason. `limits`
    are the names that the most output tokens have here, the usual one first.
    """

    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, RefusedField] = field(default_factory=dict)
    limits: tuple[str, ...] = ()


_IGNORED = {
    "guided_decoding_backend": "there is one backend",
    "guided_whitespace_pattern": "JSON is written without optional blanks",
    "kv_transfer_params": "groups of workers see to it themselves",
    "metadata": "nothing is stored",
    "mm_processor_kwargs": "there are no images",
    "nvext": "for another server",
    "prompt_cache_key": "prefixes are cached without it; `cache_salt` divides them",
    "prompt_cache_options": "prefixes are cached without it",
    "prompt_cache_retention": "a prefix stays cached while there is room",
    "safety_identifier": "it is not used",
    "session_id": "a request goes where there is room",
    "spaces_between_special_tokens": "a tokenizer of this kind adds none",
    "store": "nothing is stored",
    "stream_interval": "tokens are sent as they come",
    "user": "it is not used",
    "vllm_xargs": "for extensions of another server",
}
_REFUSED = {
    "length_penalty": RefusedField("no beam search", (1, 1.0)),
    "logits_processors": RefusedField("no code of clients is run", ([],)),
    "logprob_token_ids": RefusedField("use top_logprobs", ([],)),
    "prompt_embeds": RefusedField("prompts are text or token ids"),
    "repetition_detection": RefusedField("use the penalties"),
    "thinking_token_budget": RefusedField("use max_tokens"),
    "use_beam_search": RefusedField("no beam search", (False,)),
}
CHAT = Policy(
    limits=("max_completion_tokens", "max_tokens"),
    ignored=_IGNORED | {"media_io_kwargs": "there are no images"},
    refused=_REFUSED
    | {
        "audio": RefusedField("text only"),
        "chat_template": RefusedField("the template is the model's"),
        "documents": RefusedField("put them into a message", ([],)),
        "echo": RefusedField("use /v1/completions", (False,)),
        "function_call": RefusedField("use tool_choice", ("none",)),
        "functions": RefusedField("use tools", ([],)),
        "modalities": RefusedField("text only", (["text"],)),
        "moderation": RefusedField("there is none"),
        "prediction": RefusedField("there is no speculation by clients"),
        "verbosity": RefusedField("say it in a message", ("medium",)),
        "web_search_options": RefusedField("there is no search"),
    },
)
COMPLETION = Policy(
    limits=("max_tokens",),
    ignored=_IGNORED,
    refused=_REFUSED | {"suffix": RefusedField("no filling in between texts", ("",))},
)


class UnknownFields:
    """Unknown fields of a body: the first one is refused, or all are noted for a warning."""

    def __init__(self, refuse: bool) -> None:
        self._refuse = refuse
        self._names: list[str] = []
        self._count = 0

    def note(self, name: str, inside: str = "", known: Collection[str] = ()) -> None:
        """`name` is unknown in the object `inside`, which has the fields `known`.

        Raises:
            BadRequest: where unknown fields are refused.
        """
        if self._refuse:
            where = f" in '{inside}'" if inside else ""
            raise BadRequest(
                f"unknown parameter '{shown(name)}'{where}{_suggestion(name, known)};"
                " correct its name or leave it out",
                param=inside or shown(name),
                code=UNKNOWN_PARAMETER,
            )
        self._count += 1
        if len(self._names) < NAMES_SHOWN:
            path = f"{inside}.{name}" if inside else name
            told = "".join(c if c in _PLAIN else "?" for c in path[:NAME_CHARS])
            self._names.append(told + _suggestion(name, known))

    def keep_known(self, data: Mapping[str, Any], known: Collection[str], inside: str) -> dict[str, Any]:
        """The fields of the object `inside` that are known."""
        for name in data:
            if name not in known:
                self.note(name, inside, known)
        return {name: value for name, value in data.items() if name in known}

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence that names the unknown fields, if there are any; ASCII, for a header."""
        if not self._count:
            return ()
        more = self._count - len(self._names)
        names = ", ".join(self._names) + (f" and {more} more" if more else "")
        return (f"unknown and ignored: {names}",)


def known_fields(
    data: Mapping[str, Any], fields: Collection[str], policy: Policy, unknown: UnknownFields
) -> dict[str, Any]:
    """`data` without the fields that ask for nothing here.

    Raises:
        NotSupported: if a field asks for something that is not served.
        BadRequest: if a field is unknown and that is refused, or it is another dialect's limit.
    """
    kept = {}
    for name, value in data.items():
        if name in fields:
            kept[name] = value
        elif (refused := policy.refused.get(name)) is not None:
            if value is not None and not any(_same(value, none) for none in refused.neutral):
                raise NotSupported(
                    f"'{name}' with this value is not supported ({refused.note}); leave it out",
                    param=name,
                )
        elif name not in policy.ignored:
            _check_limit(name, data, policy)
            unknown.note(name, known=fields)
    return kept


def _check_limit(name: str, data: Mapping[str, Any], policy: Policy) -> None:
    """Refuse another dialect's limit: ignored, the output would grow to what the context allows.

    Some clients send every name that there is; beside the one of here others are only unknown.
    """
    missing = all(data.get(limit) is None for limit in policy.limits)
    if name in LIMITS and policy.limits and missing and data[name] is not None:
        raise BadRequest(
            f"'{name}' is '{policy.limits[0]}' here; use that name",
            param=name,
            code=UNKNOWN_PARAMETER,
        )


def _suggestion(name: str, known: Collection[str]) -> str:
    """The known name that an unknown one is similar to, in words."""
    similar = get_close_matches(name[:NAME_CHARS].lower(), known, n=1, cutoff=_SIMILAR)
    return f" (did you mean '{similar[0]}'?)" if similar else ""


def shown(name: str) -> str:
    """A client's name, made safe for an error."""
    return name[:NAME_CHARS].encode("ascii", "backslashreplace").decode()


def _same(value: Any, other: Any) -> bool:
    """Equal and of one type: True is not 1."""
    return type(value) is type(other) and bool(value == other)
