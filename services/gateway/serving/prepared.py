"""Prepared requests: what clients ask, ready for the cluster, in one form for every door."""

from dataclasses import dataclass

from services.core.ask import NO_PREFIX
from services.core.prefix.block_hash import ThinHashes
from services.core.request import Request
from services.core.service import ServiceClass
from services.gateway.tools.format import ChatForm


@dataclass(frozen=True, slots=True)
class PreparedChoice:
    """One choice of an answer: the request for a worker, and what becomes of its tokens.

    `eos_ids` are the stop tokens that are the model's and not the client's; `n` is how many choices
    its prompt has. With `include_stop` the text ends with what stopped it. `echo` is what the text
    begins with; `chat` how that of a chat is read, None if all of it is content. A choice that is
    `prompt_only` shows none of its output: its client wants none, but a worker makes at least one
    token. `prompt_top` of the likeliest tokens are told beside each of
    the prompt's; None: as many as beside those of the output. `prefix` is what the scheduler is
    told of the prompt. The tokens of one that is `coalesced` may come many at a time.
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
    coalesced: bool = False

    @property
    def request_id(self) -> str:
        """Unique in the cluster."""
        return self.request.request_id


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """Checked, tokenised, with every default filled in.

    `created` is in seconds of Unix time; `model` is the name that the client used. `choices` are
    those of the first prompt, then those of the next. `prompt_tokens` counts each prompt once,
    however many choices it has.
    """

    response_id: str
    created: int
    model: str
    choices: tuple[PreparedChoice, ...]
    prompt_tokens: int
    service_class: ServiceClass = ServiceClass.STANDARD
