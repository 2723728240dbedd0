"""Who may come in: tokens count once, certificates belong to keys, and a revoked node is out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'polyfed[flower]'")

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from polyfed.errors import SettingError
from polyfed.flower.deploy.certificates import (
    BadRequest,
    Signed,
    certificate_request,
    expires_soon,
    load_authority,
    renew_server_certificate,
    serial_of,
    sign_request,
)
from polyfed.flower.serve.enrolment import Enrolment
from polyfed.flower.serve.registry import ENROLLED, NodeRegistry
from polyfed.runs.folder.audit_log import AuditLog, lines_of


def public(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    return load_authority(tmp_path_factory.mktemp("authority"), "test authority")


@pytest.fixture(scope="module")
def key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def test_a_token_counts_once_and_a_lost_answer_can_be_asked_for_again(
    tmp_path: Path, authority: Signed, key: ec.EllipticCurvePrivateKey
) -> None:
    with NodeRegistry.changed(tmp_path) as registry:
        token = registry.invite("node-1")
    request = certificate_request(key, "node-1")
    with NodeRegistry.changed(tmp_path) as registry:
        first = registry.enrol(authority, token, request, public(key))
    assert token not in (tmp_path / "nodes.json").read_text()
    with NodeRegistry.changed(tmp_path) as registry:
        assert registry.enrol(authority, token, request, public(key)).certificate == first.certificate
        other = ec.generate_private_key(ec.SECP384R1())
        with pytest.raises(BadRequest, match="used with other keys"):
            registry.enrol(authority, token, certificate_request(other, "node-1"), public(other))
        with pytest.raises(BadRequest, match="unknown or was used"):
            registry.enrol(authority, "guessed", request, public(key))
    assert NodeRegistry.read(tmp_path).nodes["node-1"].serials == [first.serial]


def test_the_certificate_has_the_name_the_server_gave_and_is_for_clients_only(
    authority: Signed, key: ec.EllipticCurvePrivateKey
) -> None:
    made = sign_request(authority, certificate_request(key, "node-1,CN=admin"), "node-7")
    assert [name.value for name in made.subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == ["node-7"]
    usage = made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    made.verify_directly_issued_by(authority.certificate)
    assert len(serial_of(made)) % 2 == 0 and int(serial_of(made), 16) == made.serial_number
    assert not expires_soon(made)
    assert expires_soon(sign_request(authority, certificate_request(key, "x"), "node-7", days=0))


def test_other_curves_and_broken_requests_are_refused(authority: Signed) -> None:
    for curve in (ec.SECP256R1(), ec.SECP256K1()):
        weak = ec.generate_private_key(curve)
        with pytest.raises(BadRequest, match="P-384"):
            sign_request(authority, certificate_request(weak, "node-1"), "node-1")
        with pytest.raises(BadRequest, match="not a certificate request"):
            sign_request(authority, b"-----BEGIN CERTIFICATE REQUEST-----", "node-1")


def test_a_renewed_node_may_use_both_certificates_until_the_new_one_was_seen(
    tmp_path: Path, authority: Signed, key: ec.EllipticCurvePrivateKey
) -> None:
    with NodeRegistry.changed(tmp_path) as registry:
        old = registry.enrol(authority, registry.invite("node-1"), certificate_request(key, "n"), public(key))
        new = registry.renew(authority, old.serial, certificate_request(key, "n"))
        assert new.serials == [new.serial, old.serial] and new.key == old.key and new.state == ENROLLED
        assert registry.revoke("node-1").serials == []
        with pytest.raises(BadRequest, match="does not belong to an enrolled node"):
            registry.renew(authority, new.serial, certificate_request(key, "n"))


def test_a_node_that_is_invited_again_is_out_until_it_enrols(
    tmp_path: Path, authority: Signed, key: ec.EllipticCurvePrivateKey
) -> None:
    with NodeRegistry.changed(tmp_path) as registry:
        registry.enrol(authority, registry.invite("node-1"), certificate_request(key, "n"), public(key))
        registry.invite("node-1")
    assert NodeRegistry.read(tmp_path).nodes["node-1"].serials == []


def test_a_clients_name_belongs_to_the_node_that_enrolled_with_it(
    tmp_path: Path, authority: Signed, key: ec.EllipticCurvePrivateKey
) -> None:
    request = certificate_request(key, "n")
    with NodeRegistry.changed(tmp_path) as registry:
        registry.enrol(authority, registry.invite("node-1"), request, public(key), "pen")
        token = registry.invite("node-2")
        for taken in ("pen", "node-1"):
            with pytest.raises(BadRequest, match=f"the client name {taken} belongs to node-1"):
                registry.enrol(authority, token, request, public(key), taken)
        registry.enrol(authority, token, request, public(key), "photo")
        assert registry.client_names() == {"pen": "node-1", "photo": "node-2"}
        again = registry.invite("node-1")
        assert registry.client_names()["pen"] == "node-1", "also while it is to enrol with new keys"
        registry.enrol(authority, again, request, public(key), "node-1")
        registry.revoke("node-2")
        assert registry.client_names() == {"node-1": "node-1"}, "the name of a revoked node is free"
    assert NodeRegistry.read(tmp_path).client_names() == {"node-1": "node-1"}


def test_enrolment_takes_a_clients_name_without_control_characters(
    tmp_path: Path, authority: Signed, key: ec.EllipticCurvePrivateKey
) -> None:
    with NodeRegistry.changed(tmp_path) as registry:
        token = registry.invite("node-1")
    service = Enrolment(tmp_path, authority, AuditLog(tmp_path / "audit.jsonl"), lambda: None)
    asked = {"token": token, "request": certificate_request(key, "n").decode(), "key": public(key).decode()}
    status, _ = service.answer(json.dumps({**asked, "client": " pe\x1bn\n"}).encode(), "10.0.0.1", "")
    assert status == 200 and NodeRegistry.read(tmp_path).client_names() == {"pen": "node-1"}


def test_requests_that_are_no_table_of_texts_are_refused_and_audited(tmp_path: Path, authority: Signed) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl")
    service = Enrolment(tmp_path, authority, audit, lambda: None)
    bodies = (b"", b"\xff", b"[]", b'{"token": 3}', b"[" * 100_000, b'{"token": "\\ud800"}', b'{"token": "x", "key": "\\udfff"}')
    for body in bodies:
        status, found = service.answer(body, "10.0.0.1", "")
        assert status == 403 and "its request is not" in found["problem"], body[:40]
    assert [line["event"] for line in lines_of(audit.path)] == ["enrolment refused"] * len(bodies)


def test_unknown_nodes_and_odd_names_are_named(tmp_path: Path) -> None:
    with NodeRegistry.changed(tmp_path) as registry:
        registry.invite("node-1")
        with pytest.raises(SettingError, match="Did you mean node-1"):
            registry.revoke("nod-1")
        with pytest.raises(SettingError, match="lowercase letters"):
            registry.invite('node"; evil')


def test_the_servers_certificate_is_made_again_for_other_hosts_or_when_it_ends_soon(tmp_path: Path) -> None:
    authority = load_authority(tmp_path, "test")
    assert renew_server_certificate(tmp_path, authority, ["fl.example.org"])
    assert not renew_server_certificate(tmp_path, authority, ["fl.example.org"])
    assert renew_server_certificate(tmp_path, authority, ["10.0.0.1"], days=0)
    assert renew_server_certificate(tmp_path, authority, ["10.0.0.1"])
    assert not renew_server_certificate(tmp_path, authority, ["10.0.0.1"])
    assert load_authority(tmp_path, "test").certificate == authority.certificate
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
