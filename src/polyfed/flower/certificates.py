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
