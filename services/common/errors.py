"""Errors that all services may raise; each message states cause and remedy in one sentence."""


class ServiceError(Exception):
    """Base of errors whose message is shown to operators.

    A process that ends with the error exits with `exit_code`. 2 means that a restart helps only
    after a change, such as of the configuration.
    """

    exit_code = 2


class ConfigError(ServiceError):
    """The configuration is invalid."""


class StoreError(ServiceError):
    """etcd did not answer or refused the call."""


class StoreTimeout(StoreError):
    """etcd did not answer in time; a write may have been applied."""


class StoreRefused(StoreError):
    """etcd rejects this user, or denies it the operation."""
