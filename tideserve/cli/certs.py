"""`tideserve certs`: a development CA with a certificate for each service of a cluster."""

import datetime
from collections.abc import Sequence
from pathlib import Path

from services.common.role import ROLES, name_of
from tideserve.cli.certificates import Authority, write_pair
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError

CA = "ca"
# Clients reach etcd and the gateway by host names.
HOSTED = ("etcd", "http")
DEFAULT_HOSTS = ("localhost", "127.0.0.1", "::1")


def write_certificates(folder: Path, hosts: Sequence[str], days: int) -> list[str]:
    """Write `ca.pem` and a pair for each role and for etcd and HTTP; the names that were written.

    An existing CA is kept and issues the new certificates: running services read the changed files
    and go on trusting each other.

    Raises:
        CommandError: if the folder cannot be written, or what is there is no CA.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        authority = _authority(folder)
        lifetime = datetime.timedelta(days=days)
        for role in ROLES:
            write_pair(folder, role, authority.issue(role, (name_of(role),), lifetime))
        for name in HOSTED:
            every = dict.fromkeys((*DEFAULT_HOSTS, name, *hosts))
            write_pair(folder, name, authority.issue(name, every, lifetime))
    except OSError as error:
        raise CommandError(
            f"cannot write certificates into {folder}: {error.strerror}; choose another folder",
            EXIT_UNUSABLE,
        ) from error
    except ValueError as error:
        raise CommandError(
            f"the CA in {folder} or a host name cannot be used ({error}); correct the name, or"
            " delete ca.pem and ca-key.pem there",
            EXIT_UNUSABLE,
        ) from error
    return [*ROLES, *HOSTED]


def _authority(folder: Path) -> Authority:
    cert, key = folder / f"{CA}.pem", folder / f"{CA}-key.pem"
    if cert.exists() and key.exists():
        return Authority.read(cert, key)
    authority = Authority.create("tideserve development CA")
    write_pair(folder, CA, authority.files)
    return authority
