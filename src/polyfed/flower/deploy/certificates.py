"""Certificates of a deployment: an authority, and what it signs for the server and the nodes."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from polyfed.errors import MissingExtra, SettingError
from polyfed.flower.deploy.private_files import write_private

try:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise MissingExtra(
        "Certificates and keys need the package cryptography. Install it with: pip install 'polyfed[flower]'"
    ) from error

CA_CERTIFICATE, CA_KEY = "ca.crt", "ca.key"
SERVER_CERTIFICATE, SERVER_KEY = "server.crt", "server.key"
LOOPBACK = ("localhost", "127.0.0.1")
HOST_NAME = r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?"
AUTHORITY_DAYS, CERTIFICATE_DAYS = 3650, 90
RENEWED_BEFORE = 1 / 3
"""A certificate is renewed when this share of its time is left."""


class BadRequest(ValueError):
    """A certificate request or a key that cannot be accepted."""


class Signed(NamedTuple):
    """A certificate with its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------------- building
def _begun(subject: x509.Name, issuer: Signed | None, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    """A certificate that is still to be signed; without an issuer, that of an authority, which signs itself."""
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).public_key(key).serial_number(x509.random_serial_number())
    builder = builder.issuer_name(issuer.certificate.subject if issuer else subject)
    # Clocks of different machines differ: valid since an hour ago.
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + datetime.timedelta(days=days))
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=issuer is None,
        crl_sign=issuer is None,
        encipher_only=False,
        decipher_only=False,
    )
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None if issuer else 0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    issuer_key = issuer.key.public_key() if issuer else key
    return builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)


def _named(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def pem(certificate: x509.Certificate) -> bytes:
    text: bytes = certificate.public_bytes(serialization.Encoding.PEM)
    return text


def pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    form, unlocked = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    text: bytes = key.private_bytes(serialization.Encoding.PEM, form, unlocked)
    return text


# ---------------------------------------------------------------------------------------------------- files of a server
def kept_authority(folder: Path, called: str) -> Signed:
    """The authority whose files are in a folder; made with the first use."""
    certificate, key_file = folder / CA_CERTIFICATE, folder / CA_KEY
    if not key_file.exists():
        key = ec.generate_private_key(ec.SECP384R1())
        made = _begun(_named(called), None, key.public_key(), AUTHORITY_DAYS).sign(key, hashes.SHA384())
        write_private(certificate, pem(made))
        # The key last: where there is a key, there is a certificate.
        write_private(key_file, pem_key(key))
    return read_signed(certificate, key_file)


def kept_server(folder: Path, authority: Signed, hosts: Sequence[str], days: int = CERTIFICATE_DAYS) -> bool:
    """Make the server's certificate where it is missing, is for other hosts, or is to be renewed; says whether it was made."""
    certificate, key_file = folder / SERVER_CERTIFICATE, folder / SERVER_KEY
    wanted = list(dict.fromkeys([*LOOPBACK, *hosts]))
    if key_file.exists() and certificate.exists():
        found = read_certificate(certificate)
        if not ends_soon(found) and _hosts_of(found) == sorted(wanted):
            return False
    key = ec.generate_private_key(ec.SECP384R1())
    names = [x509.IPAddress(ipaddress.ip_address(host)) if is_address(host) else x509.DNSName(host) for host in wanted]
    builder = _begun(_named("polyfed server"), authority, key.public_key(), days)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    write_private(key_file, pem_key(key))
    write_private(certificate, pem(builder.sign(authority.key, hashes.SHA384())))
    return True


def keep_loopback_server(folder: Path, called: str) -> None:
    """Make an authority and a certificate that never leave this machine; processes read them once, and may run for years."""
    kept_server(folder, kept_authority(folder, called), [], AUTHORITY_DAYS)


def _hosts_of(certificate: x509.Certificate) -> list[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return sorted([*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))])


def read_signed(certificate: Path, key: Path) -> Signed:
    try:
        found = serialization.load_pem_private_key(key.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SettingError(f"{key} is no private key without a password ({error}).") from error
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise SettingError(f"{key} is no key on an elliptic curve.")
    return Signed(read_certificate(certificate), found)


def read_certificate(file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except ValueError as error:
        raise SettingError(f"{file} is no certificate ({error}).") from error


def ends_soon(certificate: x509.Certificate) -> bool:
    """Whether a certificate is to be renewed."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return bool(end - datetime.datetime.now(datetime.UTC) < (end - begin) * RENEWED_BEFORE)


def serial_of(certificate: x509.Certificate) -> str:
    """The serial number as nginx writes it: two digits for each byte."""
    digits = f"{certificate.serial_number:X}"
    return digits.zfill(len(digits) + len(digits) % 2)


# ---------------------------------------------------------------------------------------------------- requests of nodes
def certificate_request(key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    """What a node sends to be given a certificate."""
    request = x509.CertificateSigningRequestBuilder().subject_name(_named(name)).sign(key, hashes.SHA384())
    text: bytes = request.public_bytes(serialization.Encoding.PEM)
    return text


def sign_request(authority: Signed, request: bytes, name: str, days: int = CERTIFICATE_DAYS) -> x509.Certificate:
    """A certificate for the key of a request. The name is the server's word: what the request calls itself does not count."""
    try:
        found = x509.load_pem_x509_csr(request)
        valid = found.is_signature_valid
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadRequest("it is no certificate request") from error
    key = found.public_key()
    if not valid or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise BadRequest("its certificate request is not signed by a key on the curve P-384")
    builder = _begun(_named(name), authority, key, days)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
    return builder.sign(authority.key, hashes.SHA384())


def read_public_key(text: bytes) -> bytes:
    """The public key by which Flower knows a node, in the form in which Flower sends it."""
    try:
        key = serialization.load_pem_public_key(text)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadRequest("it sent no public key") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise BadRequest("its public key is not on the curve P-384")
    form: bytes = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return form
