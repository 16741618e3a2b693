import datetime
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from services.common.role import ROLES, name_of
from services.common.tls import CertificateFiles, check_certificates
from tideserve.cli.certificates import write_certificates
from tideserve.cli.commands.main import app
from tideserve.cli.errors import CommandError


def names_in(path: Path) -> set[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in names}


def test_certificates_name_their_role_or_host(tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["certs", str(tmp_path), "--host", "llm.test", "--days", "3"])
    assert answer.exit_code == 0, answer.output
    for role in ROLES:
        assert names_in(tmp_path / f"{role}.pem") == {name_of(role)}
        pair = (tmp_path / f"{role}.pem", tmp_path / f"{role}-key.pem")
        check_certificates(CertificateFiles("tls", tmp_path / "ca.pem", *pair))
        assert pair[1].stat().st_mode & 0o777 == 0o600
    for name in ("etcd", "http"):
        assert names_in(tmp_path / f"{name}.pem") >= {name, "localhost", "127.0.0.1", "llm.test"}
    ca = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    issued = x509.load_pem_x509_certificate((tmp_path / "worker.pem").read_bytes())
    issued.verify_directly_issued_by(ca)
    left = issued.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=2) < left <= datetime.timedelta(days=3)


def test_a_second_run_renews_below_the_same_ca(tmp_path: Path) -> None:
    write_certificates(tmp_path, (), 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write_certificates(tmp_path, (), 1)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name for name in after if after[name] == before[name]} == {"ca.pem", "ca-key.pem"}
    assert after.keys() == before.keys()


def test_unusable_input_is_a_short_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CommandError, match="cannot write certificates into"):
        write_certificates(tmp_path / "file", (), 1)
    for name in ("ca.pem", "ca-key.pem"):
        (tmp_path / name).write_text("nonsense")
    with pytest.raises(CommandError, match=r"delete ca\.pem"):
        write_certificates(tmp_path, (), 1)
