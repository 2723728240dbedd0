"""The authority of a deployment: its server certificates verify for their names only, and private files are private."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import stat
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'polyfed[flower]'")

from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from polyfed.flower.deploy.certificates import (
    CA_CERTIFICATE,
    CA_KEY,
    SERVER_CERTIFICATE,
    SERVER_KEY,
    load_authority,
    read_certificate,
    renew_server_certificate,
)

HOSTS = ["fl.example.org", "10.1.2.3", "localhost"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("authority")
    assert renew_server_certificate(folder, load_authority(folder, "test"), HOSTS, days=7)
    return folder


def test_the_server_certificate_verifies_for_its_names_only(made: Path) -> None:
    authority, server = read_certificate(made / CA_CERTIFICATE), read_certificate(made / SERVER_CERTIFICATE)
    builder = PolicyBuilder().store(Store([authority]))
    names = [x509.DNSName("localhost"), x509.DNSName("fl.example.org")]
    names += [x509.IPAddress(ipaddress.ip_address(text)) for text in ("127.0.0.1", "10.1.2.3")]
    for name in names:
        assert builder.build_server_verifier(name).verify(server, []) == [server, authority]
    with pytest.raises(VerificationError):
        builder.build_server_verifier(x509.DNSName("elsewhere.example.org")).verify(server, [])
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=8)
    with pytest.raises(VerificationError):
        builder.time(later).build_server_verifier(names[0]).verify(server, [])


def test_a_server_certificate_of_another_authority_does_not_verify(made: Path, tmp_path: Path) -> None:
    renew_server_certificate(tmp_path, load_authority(tmp_path, "other"), HOSTS)
    outsider, authority = read_certificate(tmp_path / SERVER_CERTIFICATE), read_certificate(made / CA_CERTIFICATE)
    with pytest.raises(VerificationError):
        PolicyBuilder().store(Store([authority])).build_server_verifier(x509.DNSName("localhost")).verify(outsider, [])


def test_a_server_with_these_files_is_trusted_by_python_itself(made: Path) -> None:
    client = ssl.create_default_context(cafile=str(made / CA_CERTIFICATE))
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    server.load_cert_chain(made / SERVER_CERTIFICATE, made / SERVER_KEY)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    far = server.wrap_bio(to_server, to_client, server_side=True)
    done: set[object] = set()
    for _ in range(10):
        for side in (near, far):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                pass
    assert done == {near, far}


def test_private_files_are_private(made: Path) -> None:
    assert {stat.S_IMODE((made / name).stat().st_mode) for name in (CA_KEY, SERVER_KEY)} == {0o600}
