"""Errors that every service may raise; each message says cause and remedy in one sentence."""


class ServiceError(Exception):
    """Base of errors that are reported to people as one sentence.

    `exit_code` is that of a process which ends with the error: 2 means that starting it again
    without a change is pointless.
    """

    exit_code = 2


class ConfigError(ServiceError):
    """The configuration is not usable."""


class StoreError(ServiceError):
    """etcd did not answer or refused the call."""


class StoreTimeout(StoreError):
    """etcd did not answer in time; a write may have been applied."""


class StoreRefused(StoreError):
    """etcd does not let this user in, or not do that."""
