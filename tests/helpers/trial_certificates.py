"""Certificates and node keys of a trial deployment, as a user would bring them."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from polyfed.flower.deploy.certificates import load_authority, renew_server_certificate
from polyfed.flower.deploy.private_files import private_folder, write_private


def node_name(number: int) -> str:
    """The file of a node's private key; its public key ends in ``.pub``."""
    return f"node-{number}"


def make_certificates(folder: Path, nodes: int) -> None:
    """Write an authority, a server certificate for loopback, and node keys in OpenSSH's form, which Flower reads."""
    private_folder(folder)
    renew_server_certificate(folder, load_authority(folder, "trial"), [])
    encoding, form = serialization.Encoding, serialization.PrivateFormat.OpenSSH
    for number in range(1, nodes + 1):
        key = ec.generate_private_key(ec.SECP384R1())
        write_private(folder / node_name(number), key.private_bytes(encoding.PEM, form, serialization.NoEncryption()))
        public = key.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        (folder / f"{node_name(number)}.pub").write_bytes(public + b"\n")
