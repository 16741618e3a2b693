"""Clients of a change-over world: the expected output of each request, and the tokens received.

A reader follows its request when the leader moves it. A token is a function of all tokens before
it, so a disturbed run must produce the tokens of the undisturbed run.
"""

from dataclasses import dataclass, field

from services.core.changeover.vocabulary import NoteAdopted, NoteMoved
from services.core.planner.events import EmitToken, RefuseRequest
from services.core.planner.sequence_ids import request_id_of
from services.core.request import Limits, Request, Sampling
from services.core.service import DEFAULT_SERVICE, Service
from tests.support.fake_stage import require

VOCABULARY = 997


def next_token(tokens: tuple[int, ...]) -> int:
    """The token that follows these tokens."""
    return hash(tokens) % VOCABULARY


@dataclass
class Stream:
    """A client's request and the tokens received; `owner` is the worker it reads from."""

    request: Request
    owner: str
    truth: tuple[int, ...] = ()  # prompt and output of the undisturbed run
    kv: tuple[int, ...] = ()  # of each token of it
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    aborted: bool = False
    refused: str = ""
    lost: bool = False  # to be asked for again

    def __post_init__(self) -> None:
        self.truth = self.request.prompt_ids
        for _ in range(self.request.limits.max_tokens):
            self.truth += (next_token(self.truth),)
        salt = self.request.cache_salt
        self.kv = tuple(hash((salt, self.truth[: end + 1])) for end in range(len(self.truth)))

    @property
    def over(self) -> bool:
        return self.finished or self.aborted or bool(self.refused)

    @property
    def output(self) -> list[int]:
        """The output of the undisturbed run."""
        return list(self.truth[len(self.request.prompt_ids) :])


@dataclass
class Source:
    """Tokens that a worker has published for a sequence, with or without a reader."""

    name: str
    tokens: list[int]
    adopted: bool = False
    finished: bool = False
    refused: str = ""
    returned: bool = False
    moved_to: str = ""


class Clients:
    """All clients. `sources` are keyed by worker and request."""

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        self.sources: dict[tuple[str, str], Source] = {}
        self.asked_again = 0
        self.returned = 0

    def begin(self, worker_id: str, name: str) -> None:
        """A worker starts a sequence."""
        self.sources[worker_id, request_id_of(name)] = Source(name, [])

    def start(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        max_tokens: int,
        owner: str,
        salt: str = "",
        service: Service = DEFAULT_SERVICE,
    ) -> Stream:
        """A client sends a new request to a worker."""
        greedy, limits = Sampling(temperature=0.0), Limits(max_tokens)
        request = Request(
            request_id,
            prompt,
            greedy,
            limits,
            0.0,
            cache_salt=salt,
            service=service,
            resumable=True,
        )
        self.streams[request_id] = stream = Stream(request, owner)
        return stream

    def truth(self, name: str) -> tuple[int, ...]:
        """Prompt and output of a request's undisturbed run."""
        return self.streams[request_id_of(name)].truth

    def kv(self, name: str) -> tuple[int, ...]:
        """The KV of each token of `truth`, a function of all tokens before it and of the tenant."""
        return self.streams[request_id_of(name)].kv

    def open(self) -> list[str]:
        """Requests that have not ended."""
        return [name for name, stream in self.streams.items() if not stream.over]

    def publish(self, worker_id: str, command: EmitToken | RefuseRequest) -> None:
        """A worker publishes tokens of a request."""
        request_id = request_id_of(command.request_id)
        source = self.sources[worker_id, request_id]
        require(source.name == command.request_id, f"{worker_id} publishes {command.request_id}")
        if isinstance(command, RefuseRequest):
            source.refused, source.returned = command.message, command.returned
            self.returned += command.returned
        else:
            require(command.index == len(source.tokens), f"{command} after {source}")
            source.tokens.append(command.token_id)
            source.finished = command.finish_reason is not None
        self._read(request_id)

    def adopt(self, worker_id: str, command: NoteAdopted) -> None:
        """A worker has adopted a sequence."""
        name = command.sequence.request.request_id
        tokens = list(command.sequence.output_ids)
        self.sources[worker_id, request_id_of(name)] = Source(name, tokens, adopted=True)

    def move(self, worker_id: str, command: NoteMoved) -> None:
        """A worker redirects the readers of a request to its new owner."""
        request_id = request_id_of(command.seq_id)
        self.sources[worker_id, request_id].moved_to = command.worker_id
        self._read(request_id)

    def lose(self, lost: str, workers: set[str], ask_again: bool) -> None:
        """Detach the readers of these workers, of which `lost` has died."""
        self.sources = {at: source for at, source in self.sources.items() if at[0] != lost}
        for stream in self.streams.values():
            if stream.owner in workers and not stream.over:
                self._lose(stream, ask_again)

    def _lose(self, stream: Stream, ask_again: bool) -> None:
        if stream.tokens or not ask_again:
            stream.aborted = True
        else:
            stream.lost, stream.owner = True, ""

    def _read(self, request_id: str) -> None:
        stream = self.streams[request_id]
        source = self.sources.get((stream.owner, request_id))
        if stream.over or source is None:
            return
        have = len(stream.tokens)
        require(source.tokens[:have] == stream.tokens[: len(source.tokens)], "other tokens")
        stream.tokens += source.tokens[have:]
        require(stream.tokens == stream.output[: len(stream.tokens)], f"{request_id}: wrong tokens")
        if source.returned:
            self._lose(stream, ask_again=True)
            return
        stream.finished, stream.refused = source.finished, source.refused
        if source.moved_to and not stream.over:
            stream.owner = source.moved_to
            if (stream.owner, request_id) in self.sources:
                self._read(request_id)
            else:
                self._lose(stream, ask_again=True)  # it was lost meanwhile
