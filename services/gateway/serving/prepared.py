"""Prepared requests: tokenized and checked, in the same form for every API."""

from dataclasses import dataclass

from services.core.ask import NO_PREFIX
from services.core.prefix.block_hash import ThinHashes
from services.core.request import Request
from services.core.service import ServiceClass
from services.gateway.text.token_text import TokenTexts
from services.gateway.tools.format import ChatForm


@dataclass(frozen=True, slots=True)
class PreparedChoice:
    """A choice of a response: the request for a worker, and how to render its output.

    `eos_ids`: stop tokens of the model that the client did not list itself.
    `n`: number of choices of the prompt.
    `include_stop`: keep the stop string or stop token in the text.
    `echo`: text before the output, for echoed prompts.
    `prompt_only`: send no output; the client asked for none, but workers generate at least a token.
    `prompt_top`: likeliest tokens per prompt token in the response; None: as for output tokens.
    `chat`: how to parse the text of a chat; None: all text is content.
    `prefix`: a sample of the hashes of the prompt's KV blocks; the scheduler ranks workers by it.
    `expected_tokens`: the client's estimate of the output tokens, 0 without.
    `fingerprint`: a hash of the client's request and the choice's index, 0 if unknown.
    `affinity`: a hash of the session, 0 without; its requests prefer the same group.
    `held`: the output has a grammar and is not streamed, so that it may be held back and start
    again where an engine cannot resume it.
    `coalesced`: the worker may send the tokens of several iterations in one message.
    """

    request: Request
    model: str
    stop: tuple[str, ...] = ()
    eos_ids: frozenset[int] = frozenset()
    n: int = 1
    include_stop: bool = False
    skip_special_tokens: bool = True
    echo: str = ""
    prompt_only: bool = False
    prompt_top: int | None = None
    chat: ChatForm | None = None
    prefix: ThinHashes = NO_PREFIX
    expected_tokens: int = 0
    fingerprint: int = 0
    affinity: int = 0
    held: bool = False
    coalesced: bool = False

    @property
    def request_id(self) -> str:
        """The request's id at scheduler and workers, unique in the cluster."""
        return self.request.request_id


def choice_key(response_id: str, fingerprint: int, index: int) -> tuple[str, int]:
    """The id and fingerprint that scheduler and workers see of a choice; 0: unknown.

    Only for requests with several choices, over all prompts.
    """
    return f"{response_id}-{index}", fingerprint and (fingerprint + index) % 2**64


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked and tokenized request, with all defaults filled in.

    `created` is in seconds of Unix time; `model` is the name in the request, possibly an alias.
    `texts` has the model's tokens as text, for log probabilities.
    `choices` are ordered by prompt. `prompt_tokens` counts a prompt once, however many choices it
    has.
    """

    response_id: str
    created: int
    model: str
    choices: tuple[PreparedChoice, ...]
    prompt_tokens: int
    texts: TokenTexts
    service_class: ServiceClass = ServiceClass.STANDARD
