"""Errors of an upstream server: which requests end, which are tried again, which end the worker."""

from services.worker.errors import WorkerError


class UpstreamUnusable(WorkerError):
    """The server cannot be used with this configuration."""


class UpstreamChanged(Exception):
    """The server came back with another model or other limits; a restart of the worker helps."""


class UpstreamRefused(ValueError):
    """The server refused a request, or cannot do what it asks for."""


class UpstreamFailed(Exception):
    """A request failed at the server; it may be retried."""


class UpstreamLost(Exception):
    """The server, or the connection to it, was lost; its requests continue when it is back.

    `silent`: it did not answer in time, so it may just be busy.
    """

    def __init__(self, message: str, *, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent


class UpstreamBusy(Exception):
    """The server refused a request for lack of room; `retry_after_s` is its advice."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"the upstream server is full; retry in {retry_after_s:g} s")
        self.retry_after_s = retry_after_s
