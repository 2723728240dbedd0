"""Certificates of a deployment: an authority, and what it signs for the server and the nodes."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from typing import NamedTuple

from polyfed.errors import MissingExtra

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise MissingExtra(
        "Certificates and keys need the package cryptography. Install it with: pip install 'polyfed[flower]'"
    ) from error
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from polyfed.errors import SettingError
from polyfed.flower.deploy.private_files import write_private

CA_CERTIFICATE, CA_KEY = "ca.crt", "ca.key"
SERVER_CERTIFICATE, SERVER_KEY = "server.crt", "server.key"
LOOPBACK = ("localhost", "127.0.0.1")
HOST_NAME = r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?"


class Signed(NamedTuple):
    """A certificate with its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def is_address(host: str) -> bool:
    """Whether a host is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def make_authority(days: int, called: str) -> Signed:
    """An authority with a new key."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = named(called)
    builder = begun(name, name, key.public_key(), days).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage(signs_certificates=True), critical=True)
    builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
    return Signed(builder.sign(key, hashes.SHA384()), key)


def named(common_name: str) -> x509.Name:
    """The name of somebody in a certificate."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def server_certificate(authority: Signed, hosts: Sequence[str], days: int, called: str) -> Signed:
    """A server's certificate for these names and addresses, with a new key."""
    key = ec.generate_private_key(ec.SECP384R1())
    names = [
        x509.IPAddress(ipaddress.ip_address(host)) if is_address(host) else x509.DNSName(host) for host in dict.fromkeys(hosts)
    ]
    builder = for_purpose(authority, named(called), key.public_key(), days, ExtendedKeyUsageOID.SERVER_AUTH)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return Signed(builder.sign(authority.key, hashes.SHA384()), key)


def for_purpose(
    authority: Signed, name: x509.Name, key: ec.EllipticCurvePublicKey, days: int, purpose: x509.ObjectIdentifier
) -> x509.CertificateBuilder:
    """A certificate of this authority, for one purpose only, still to be signed."""
    builder = begun(name, authority.certificate.subject, key, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    return builder.add_extension(issuer, critical=False)


def begun(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    """What all certificates begin with."""
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    # Clocks of different machines differ: valid since an hour ago.
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + datetime.timedelta(days=days))
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def usage(signs_certificates: bool) -> x509.KeyUsage:
    """What a key may be used for."""
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def pem(certificate: x509.Certificate) -> bytes:
    """A certificate as text."""
    text: bytes = certificate.public_bytes(serialization.Encoding.PEM)
    return text


def pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as text, without a password."""
    form, unlocked = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    text: bytes = key.private_bytes(serialization.Encoding.PEM, form, unlocked)
    return text


AUTHORITY_DAYS, CERTIFICATE_DAYS = 3650, 90
RENEWED_BEFORE = 1 / 3
"""A certificate is renewed when this share of its time is left."""
LOOPBACK_DAYS = AUTHORITY_DAYS
"""Certificates that never leave a machine: the processes that use them read them once, and may run for years."""


class BadRequest(ValueError):
    """A certificate request or a key that cannot be accepted."""


def kept_authority(folder: Path, called: str) -> Signed:
    """The authority whose files are in a folder; made with the first use."""
    certificate, key = folder / CA_CERTIFICATE, folder / CA_KEY
    if not key.exists():
        made = make_authority(AUTHORITY_DAYS, called)
        write_private(certificate, pem(made.certificate))
        # The key last: where there is a key, there is a certificate.
        write_private(key, pem_key(made.key))
    return read_signed(certificate, key)


def kept_server(folder: Path, authority: Signed, hosts: Sequence[str], days: int = CERTIFICATE_DAYS) -> bool:
    """Make the server's certificate where it is missing, is for other hosts, or is to be renewed; says whether it was made."""
    certificate, key = folder / SERVER_CERTIFICATE, folder / SERVER_KEY
    wanted = list(dict.fromkeys([*LOOPBACK, *hosts]))
    if key.exists() and certificate.exists():
        found = read_certificate(certificate)
        if not ends_soon(found) and hosts_of(found) == sorted(wanted):
            return False
    made = server_certificate(authority, wanted, days, "polyfed server")
    write_private(key, pem_key(made.key))
    write_private(certificate, pem(made.certificate))
    return True


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """The names and addresses that a certificate is for."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return sorted([*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))])


def read_signed(certificate: Path, key: Path) -> Signed:
    """A certificate and its private key from their files."""
    try:
        found = serialization.load_pem_private_key(key.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SettingError(f"{key} is no private key without a password ({error}).") from error
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise SettingError(f"{key} is no key on an elliptic curve.")
    return Signed(read_certificate(certificate), found)


def read_certificate(file: Path) -> x509.Certificate:
    """A certificate from its file."""
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except ValueError as error:
        raise SettingError(f"{file} is no certificate ({error}).") from error


def ends_soon(certificate: x509.Certificate) -> bool:
    """Whether a certificate is to be renewed."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return bool(end - datetime.datetime.now(datetime.UTC) < (end - begin) * RENEWED_BEFORE)


def serial_of(certificate: x509.Certificate) -> str:
    """The serial number as nginx writes it: two digits for each byte.

    >>> f"{0x0ABC:x}".zfill(4).upper()
    '0ABC'
    """
    digits = f"{certificate.serial_number:X}"
    return digits.zfill(len(digits) + len(digits) % 2)


def certificate_request(key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    """What a node sends to be given a certificate."""
    request = x509.CertificateSigningRequestBuilder().subject_name(named(name)).sign(key, hashes.SHA384())
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
    builder = for_purpose(authority, named(name), key, days, ExtendedKeyUsageOID.CLIENT_AUTH)
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
