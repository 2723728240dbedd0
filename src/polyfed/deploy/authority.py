"""The authority of a deployment: it signs the certificates of the server and of the nodes.

Nodes make their keys themselves, and send a certificate request, which proves that they have the key. All cryptography is that of the
library ``cryptography``.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from polyfed.deploy.private_files import write_private
from polyfed.errors import SettingError
from polyfed.flower.certificates import (
    CA_CERTIFICATE,
    CA_KEY,
    LOOPBACK,
    SERVER_CERTIFICATE,
    SERVER_KEY,
    Signed,
    for_purpose,
    make_authority,
    named,
    pem,
    pem_key,
    server_certificate,
)

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
