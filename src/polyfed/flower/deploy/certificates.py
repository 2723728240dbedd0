"""Certificates of a deployment: the certificate authority, and certificates for the server and the nodes."""

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
        "Certificates and keys require the package cryptography. Install it with: pip install 'polyfed[flower]'"
    ) from error

CA_CERTIFICATE, CA_KEY = "ca.crt", "ca.key"
SERVER_CERTIFICATE, SERVER_KEY = "server.crt", "server.key"
LOOPBACK = ("localhost", "127.0.0.1")
HOST_NAME = r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?"
AUTHORITY_DAYS, CERTIFICATE_DAYS = 3650, 90
RENEWED_BEFORE = 1 / 3  # a certificate is renewed when this fraction of its lifetime is left


class BadRequest(ValueError):
    """An invalid enrolment request."""


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


def _builder(name: str, issuer: Signed | None, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    """Return an unsigned certificate; without an issuer, a self-signed authority."""
    now, subject = datetime.datetime.now(datetime.UTC), _named(name)
    builder = x509.CertificateBuilder().subject_name(subject).public_key(key).serial_number(x509.random_serial_number())
    builder = builder.issuer_name(issuer.certificate.subject if issuer else subject)
    # The validity starts an hour ago, because clocks differ between machines.
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + datetime.timedelta(days=days))
    unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only")
    signs = issuer is None
    usage = x509.KeyUsage(digital_signature=True, key_cert_sign=signs, crl_sign=signs, **dict.fromkeys(unused, False))
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None if issuer else 0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    issuer_key = issuer.key.public_key() if issuer else key
    return builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)


def _named(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def pem(certificate: x509.Certificate) -> bytes:
    return bytes(certificate.public_bytes(serialization.Encoding.PEM))


def pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    form, unlocked = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return bytes(key.private_bytes(serialization.Encoding.PEM, form, unlocked))


def load_authority(folder: Path, name: str) -> Signed:
    """Load the authority of a folder; the first use creates it."""
    certificate, key_file = folder / CA_CERTIFICATE, folder / CA_KEY
    if not key_file.exists():
        key = ec.generate_private_key(ec.SECP384R1())
        signed = _builder(name, None, key.public_key(), AUTHORITY_DAYS).sign(key, hashes.SHA384())
        write_private(certificate, pem(signed))
        # Write the key last, so that every key has a certificate.
        write_private(key_file, pem_key(key))
    return read_signed(certificate, key_file)


def renew_server_certificate(folder: Path, authority: Signed, hosts: Sequence[str], days: int = CERTIFICATE_DAYS) -> bool:
    """Create the server certificate if it is missing, is for other hosts or expires soon. Return True if it is new."""
    certificate, key_file = folder / SERVER_CERTIFICATE, folder / SERVER_KEY
    wanted = list(dict.fromkeys([*LOOPBACK, *hosts]))
    if key_file.exists() and certificate.exists():
        found = read_certificate(certificate)
        if not expires_soon(found) and _hosts_of(found) == sorted(wanted):
            return False
    key = ec.generate_private_key(ec.SECP384R1())
    names = [x509.IPAddress(ipaddress.ip_address(host)) if is_address(host) else x509.DNSName(host) for host in wanted]
    builder = _builder("polyfed server", authority, key.public_key(), days)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    write_private(key_file, pem_key(key))
    write_private(certificate, pem(builder.sign(authority.key, hashes.SHA384())))
    return True


def create_loopback_certificates(folder: Path, name: str) -> None:
    """Create an authority and a certificate for this machine only; long-lived, since processes read them only once."""
    renew_server_certificate(folder, load_authority(folder, name), [], AUTHORITY_DAYS)


def _hosts_of(certificate: x509.Certificate) -> list[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return sorted([*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))])


def read_signed(certificate: Path, key: Path) -> Signed:
    try:
        found = serialization.load_pem_private_key(key.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SettingError(f"{key} is not a private key without a password ({error}).") from error
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise SettingError(f"{key} is not an elliptic-curve key.")
    return Signed(read_certificate(certificate), found)


def read_certificate(file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except ValueError as error:
        raise SettingError(f"{file} is not a certificate ({error}).") from error


def expires_soon(certificate: x509.Certificate) -> bool:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return bool(end - datetime.datetime.now(datetime.UTC) < (end - start) * RENEWED_BEFORE)


def serial_of(certificate: x509.Certificate) -> str:
    """Return the serial number as nginx writes it, with two digits per byte."""
    digits = f"{certificate.serial_number:X}"
    return digits.zfill(len(digits) + len(digits) % 2)


def certificate_request(key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    request = x509.CertificateSigningRequestBuilder().subject_name(_named(name)).sign(key, hashes.SHA384())
    return bytes(request.public_bytes(serialization.Encoding.PEM))


def sign_request(authority: Signed, request: bytes, name: str, days: int = CERTIFICATE_DAYS) -> x509.Certificate:
    """Sign a certificate for the key of a request. The server sets the name; the name in the request is ignored."""
    try:
        found = x509.load_pem_x509_csr(request)
        valid = found.is_signature_valid
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadRequest("it is not a certificate request") from error
    key = found.public_key()
    if not valid or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise BadRequest("its certificate request is not signed with a P-384 key")
    builder = _builder(name, authority, key, days)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
    return builder.sign(authority.key, hashes.SHA384())


def read_public_key(text: bytes) -> bytes:
    """Read a node's Flower key and return it in the format in which Flower sends it."""
    try:
        key = serialization.load_pem_public_key(text)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadRequest("its Flower key is not a public key") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise BadRequest("its public key is not a P-384 key")
    return bytes(key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
