"""Checks that certificate files are valid, do not expire soon and match their CA."""

import ssl

from services.common.certificate_expiry import expiry_unix_s
from services.common.errors import ConfigError
from services.common.tls import CertificateFiles, check_certificates
from tideserve.cli.doctor.finding import Check, Finding

CHECK = Check("certificates")
DAY_S = 86_400
SOON_DAYS = 14
ANSWERS_MAX = 8


def check_files(files: CertificateFiles, now_unix_s: float) -> list[Finding]:
    """A finding about the files; empty without files."""
    if not files.given:
        return []
    try:
        check_certificates(files)
    except ConfigError as error:
        return [CHECK.failure(str(error))]
    soon: list[Finding] = []
    for path, name in ((files.cert, "cert_file"), (files.ca, "ca_file")):
        expiry_s = expiry_unix_s(path) if path is not None else None
        if expiry_s is None:
            continue
        days = (expiry_s - now_unix_s) / DAY_S
        where = f"the certificate in '{files.owner}_{name}' ({path})"
        if days < 0:
            return [CHECK.failure(f"{where} expired {-days:.1f} days ago; replace it")]
        if days < SOON_DAYS:
            soon = [CHECK.warning(f"{where} expires in {days:.1f} days; replace it")]
    reason = _distrust(files)
    if reason:
        return [
            CHECK.failure(
                f"'{files.owner}_ca_file' ({files.ca}) does not match the certificate in"
                f" '{files.owner}_cert_file' ({files.cert}): {reason}; use the CA that issued it"
            )
        ]
    return soon or [
        CHECK.fine(f"the files of '{files.owner}_cert_file' belong together and are valid")
    ]


def _distrust(files: CertificateFiles) -> str:
    """Why a peer that trusts the CA would reject the certificate, else "".

    Performs a TLS handshake in memory, which checks everything except the host name.
    """
    if files.ca is None or files.cert is None or files.key is None:
        return ""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.cert, files.key, password=b"")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(cafile=files.ca)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(down, up)
    answering = server.wrap_bio(up, down, server_side=True)
    for _ in range(ANSWERS_MAX):
        for side in (asking, answering):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
            except ssl.SSLError as error:
                return str(error.reason)
    return ""
