import datetime
from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.common.tls import (
    CertificateFiles,
    CertificateSource,
    check_certificates,
    read_certificates,
)
from tideserve.cli.certificates import Authority, write_pair

DAY = datetime.timedelta(days=1)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("test")


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> CertificateFiles:
    renew(authority, tmp_path)
    (tmp_path / "ca.pem").write_bytes(authority.files.cert)
    return CertificateFiles(
        "tls", tmp_path / "ca.pem", tmp_path / "one.pem", tmp_path / "one-key.pem"
    )


def renew(authority: Authority, folder: Path) -> None:
    write_pair(folder, "one", authority.issue("one", ("one.test",), DAY))


def test_certificates_are_cached_until_a_file_changes(
    authority: Authority, files: CertificateFiles, tmp_path: Path
) -> None:
    source = CertificateSource(files)
    first = source.current()
    assert source.current() is first
    renew(authority, tmp_path)
    second = source.current()
    assert second.cert not in (None, first.cert)
    assert second.key not in (None, first.key)
    assert source.current() is second


def test_old_certificates_stay_while_the_pair_is_incomplete(
    authority: Authority,
    files: CertificateFiles,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = CertificateSource(files)
    first = source.current()
    issued = authority.issue("one", ("one.test",), DAY)
    (tmp_path / "one.pem").write_bytes(issued.cert)
    assert source.current() is first
    assert source.current() is first
    assert (
        len([line for line in caplog.messages if "keeping the previous certificates" in line]) == 1
    )
    (tmp_path / "one-key.pem").write_bytes(issued.key)
    assert source.current().cert == issued.cert


def test_the_second_file_may_come_while_the_first_is_refused(
    authority: Authority,
    files: CertificateFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = CertificateSource(files)
    first = source.current()
    issued = authority.issue("one", ("one.test",), DAY)
    (tmp_path / "one-key.pem").write_bytes(issued.key)

    def refused_then_whole(read: CertificateFiles) -> None:
        try:
            check_certificates(read)
        except ConfigError:
            (tmp_path / "one.pem").write_bytes(issued.cert)
            raise

    monkeypatch.setattr("services.common.tls.check_certificates", refused_then_whole)
    assert source.current() is first
    assert source.current().cert == issued.cert


def test_old_certificates_stay_while_a_file_is_missing(
    authority: Authority, files: CertificateFiles, tmp_path: Path
) -> None:
    source = CertificateSource(files)
    first = source.current()
    (tmp_path / "one-key.pem").unlink()
    assert source.current() is first
    renew(authority, tmp_path)
    assert source.current() is not first


def test_a_link_to_another_folder_is_a_change(authority: Authority, tmp_path: Path) -> None:
    """As Kubernetes replaces a mounted Secret."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        renew(authority, tmp_path / name)
    link = tmp_path / "now"
    link.symlink_to(tmp_path / "old")
    source = CertificateSource(
        CertificateFiles("tls", cert=link / "one.pem", key=link / "one-key.pem")
    )
    first = source.current()
    link.unlink()
    link.symlink_to(tmp_path / "new")
    assert source.current().cert == (tmp_path / "new" / "one.pem").read_bytes() != first.cert


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("ca.pem", None, r"cannot read 'tls_ca_file' \(.*No such file.*\); correct the path"),
        ("one.pem", None, "cannot read 'tls_cert_file'"),
        ("ca.pem", b"nonsense", "'tls_ca_file' .* contains no PEM certificate; give the CA's"),
        ("one.pem", b"nonsense", "are not a PEM certificate and its unencrypted private key"),
        ("one-key.pem", b"", "are not a PEM certificate and its unencrypted private key"),
        ("one-key.pem", Authority.create("x").files.key, "give a matching pair"),
    ],
)
def test_unusable_files_are_a_short_error(
    files: CertificateFiles, tmp_path: Path, name: str, content: bytes | None, sentence: str
) -> None:
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        CertificateSource(files)


def test_unset_files_are_none() -> None:
    files = CertificateFiles("tls")
    assert not files.given
    assert read_certificates(files).cert is None
