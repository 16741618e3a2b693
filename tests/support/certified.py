"""Certificates for tests, as files in the layout that services read."""

import datetime
from pathlib import Path
from typing import Any

from services.common.role import name_of
from services.common.tls import CertificateFiles, CertificateSource
from services.common.transport import Transport
from tideserve.cli.certificates import Authority, write_pair

DAY = datetime.timedelta(days=1)


class Certified:
    """A folder with a CA and the certificates it issues."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority.create("test")
        self.trust(self.authority)

    @property
    def ca_file(self) -> Path:
        """The file with trusted CAs."""
        return self.folder / "ca.pem"

    def trust(self, *authorities: Authority) -> None:
        """Write these CAs to `ca_file`."""
        self.ca_file.write_bytes(b"".join(authority.files.cert for authority in authorities))

    def issue(
        self, role: str, authority: Authority | None = None, age_s: float = 0.0, name: str = ""
    ) -> None:
        """Write a new certificate and key for a role as `<name>.pem` (default: the role)."""
        issuer = authority or self.authority
        write_pair(
            self.folder, name or role, issuer.issue(role, (name_of(role),), DAY, age_s=age_s)
        )

    def files(self, name: str) -> CertificateFiles:
        """Paths of the CA, certificate and key."""
        pair = (self.folder / f"{name}.pem", self.folder / f"{name}-key.pem")
        return CertificateFiles("tls", self.ca_file, *pair)

    def config(self, name: str) -> dict[str, Any]:
        """These paths as keys of a service's configuration."""
        files = self.files(name)
        return {"tls_ca_file": files.ca, "tls_cert_file": files.cert, "tls_key_file": files.key}

    def transport(self, name: str) -> Transport:
        """The transport that authenticates with this certificate."""
        return Transport(CertificateSource(self.files(name)))
