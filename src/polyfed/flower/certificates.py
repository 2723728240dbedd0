"""Certificates and keys for a trial deployment: a CA, the server's certificate, and one key pair for each node.

Nodes trust the server because the CA signed its certificate; the server trusts a node because its public key was registered.
The private keys of all nodes are made in one place, and the CA's key is not encrypted. That is fine for a trial. For real data let
each site make its own node key (``ssh-keygen -t ecdsa -b 384``) and let your own authority sign the server's certificate.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from polyfed.errors import MissingExtra, SettingError
from polyfed.flower.new_files import refuse_existing, writing_to

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
PUBLIC_SUFFIX = ".pub"
LOOPBACK = ("localhost", "127.0.0.1")
DAYS = 90
PRIVATE, PUBLIC = 0o600, 0o644
HOST_NAME = r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?"


class Signed(NamedTuple):
    """A certificate with its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def node_name(number: int) -> str:
    """The file of a node's private key; its public key lies next to it and ends in ``.pub``."""
    return f"node-{number}"


def make_certificates(folder: Path, nodes: int, hosts: Sequence[str] = (), days: int = DAYS) -> list[Path]:
    """Write a CA, a server certificate and node keys; nothing that exists is overwritten.

    Args:
        folder: where the files go; made if it does not exist, then readable by its owner only.
        nodes: how many key pairs.
        hosts: names and addresses by which nodes reach the server, in addition to localhost and 127.0.0.1.
        days: how long the certificates are valid.

    Returns:
        The files, in the order in which they were written.
    """
    _check(nodes, hosts, days)
    names = [CA_CERTIFICATE, CA_KEY, SERVER_CERTIFICATE, SERVER_KEY]
    names += [name for number in range(1, nodes + 1) for name in (node_name(number), node_name(number) + PUBLIC_SUFFIX)]
    refuse_existing(folder, names, "keys are never overwritten. Name another folder, or remove the old files.")
    authority = make_authority(days)
    server = server_certificate(authority, [*LOOPBACK, *hosts], days)
    contents = {
        CA_CERTIFICATE: pem(authority.certificate),
        CA_KEY: pem_key(authority.key),
        SERVER_CERTIFICATE: pem(server.certificate),
        SERVER_KEY: pem_key(server.key),
    }
    for number in range(1, nodes + 1):
        private, public = node_key_pair()
        contents |= {node_name(number): private, node_name(number) + PUBLIC_SUFFIX: public}
    return _written(folder, contents)


def node_key_pair() -> tuple[bytes, bytes]:
    """A private and a public key on the curve P-384 in OpenSSH's form, which is what Flower reads."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return private, public + b"\n"


def _check(nodes: int, hosts: Sequence[str], days: int) -> None:
    if nodes < 1:
        raise SettingError(f"--nodes must be at least 1, found {nodes}.")
    if days < 1:
        raise SettingError(f"--days must be at least 1, found {days}.")
    for host in hosts:
        if not is_address(host) and not re.fullmatch(HOST_NAME, host):
            raise SettingError(
                f"--host takes a name or an address without scheme and port, such as fl.example.org; found {host!r}."
            )


def is_address(host: str) -> bool:
    """Whether a host is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def make_authority(days: int, called: str = "polyfed trial CA") -> Signed:
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


def server_certificate(authority: Signed, hosts: Sequence[str], days: int, called: str = "polyfed trial server") -> Signed:
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


def _written(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write the files; what is private is so from its first byte on."""
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, content in contents.items():
            mode = PUBLIC if name.endswith((".crt", PUBLIC_SUFFIX)) else PRIVATE
            with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                os.fchmod(file.fileno(), mode)
                file.write(content)
    return [folder / name for name in contents]
