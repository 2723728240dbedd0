"""A node's requests to the enrolment service: enrol, renew the certificate, and check access."""

from __future__ import annotations

import email.utils
import http.client
import json
import ssl
import time
from typing import Any, NamedTuple

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from polyfed.flower.deploy.certificates import certificate_request, expires_soon, pem_key, read_certificate, read_signed
from polyfed.flower.deploy.folders import Membership, NodeFolder
from polyfed.flower.deploy.kit import Kit
from polyfed.flower.deploy.private_files import write_private
from polyfed.flower.join.forwarder import client_context
from polyfed.flower.join.policy import Refused
from polyfed.flower.serve.enrolment import HELLO
from polyfed.flower.serve.front import ENROL_PATH
from polyfed.flower.serve.registry import hashed

SECONDS = 30.0
LARGEST_ANSWER = 1 << 20
MAX_AHEAD, MAX_BEHIND = 5.0, 300.0  # Flower rejects a node whose clock is further off, without a reason
WARN_AT = 0.6  # fraction of these limits at which the node prints a warning


class Unreachable(OSError):
    """The server cannot be reached at the moment."""


class ServerReply(NamedTuple):
    """The server's reply, and how many seconds this machine's clock is ahead of the server's."""

    values: dict[str, Any]
    ahead: float


def enrol(folder: NodeFolder, kit: Kit, client: str) -> None:
    """Create the node's keys and obtain its certificate, unless it is enrolled; ``client`` is the client name to reserve."""
    member = Membership(kit.name, kit.host, kit.port, hashed(kit.token))
    before = folder.membership()
    if before == member and folder.certificate.exists():
        return
    if before != member:
        _make_keys(folder, kit)
        folder.remember(member)
    signed_key = serialization.load_pem_private_key(folder.tls_key.read_bytes(), None)
    flower_key = serialization.load_ssh_private_key(folder.flower_key.read_bytes(), None)
    assert isinstance(signed_key, ec.EllipticCurvePrivateKey)
    if not folder.certificate_request.exists():
        # A repeated request must be identical, or the server treats it as another node's.
        write_private(folder.certificate_request, certificate_request(signed_key, kit.name))
    public = flower_key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    values = {"token": kit.token, "request": folder.certificate_request.read_text(), "key": public.decode(), "client": client}
    reply = request(member, values, client_context(folder.authority))
    write_private(folder.certificate, str(reply.values["certificate"]))
    folder.note("enrolled", host=kit.host, port=kit.port, name=kit.name)


def _make_keys(folder: NodeFolder, kit: Kit) -> None:
    """Create the private keys for TLS and Flower, which never leave the node."""
    flower_key = ec.generate_private_key(ec.SECP384R1())
    form, unlocked = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    folder.certificate.unlink(missing_ok=True)
    folder.certificate_request.unlink(missing_ok=True)
    write_private(folder.authority, kit.authority)
    write_private(folder.tls_key, pem_key(ec.generate_private_key(ec.SECP384R1())))
    write_private(folder.flower_key, flower_key.private_bytes(serialization.Encoding.PEM, form, unlocked))


def check_access(folder: NodeFolder, member: Membership) -> ServerReply:
    """Request confirmation that this node may connect."""
    return request(member, HELLO, node_context(folder))


def renew_certificate(folder: NodeFolder, member: Membership) -> bool:
    """Renew the certificate if it expires soon. Return True if it was renewed."""
    if not expires_soon(read_certificate(folder.certificate)):
        return False
    key = read_signed(folder.certificate, folder.tls_key).key
    reply = request(member, {"request": certificate_request(key, member.name).decode()}, node_context(folder))
    write_private(folder.certificate, str(reply.values["certificate"]))
    return True


def node_context(folder: NodeFolder) -> ssl.SSLContext:
    return client_context(folder.authority, folder.certificate, folder.tls_key)


def request(member: Membership, values: dict[str, str], context: ssl.SSLContext) -> ServerReply:
    connection = http.client.HTTPSConnection(member.host, member.port, timeout=SECONDS, context=context)
    try:
        connection.request("POST", ENROL_PATH, json.dumps(values), {"Content-Type": "application/json"})
        response = connection.getresponse()
        now, body = time.time(), response.read(LARGEST_ANSWER)
    except ssl.SSLCertVerificationError as error:
        problem = f"The server at {member.host}:{member.port} is not the one in the kit ({error.verify_message})."
        raise Refused(f"{problem} Ask its operator for a new kit.") from error
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"Cannot reach the server at {member.host}:{member.port} ({error}).") from error
    finally:
        connection.close()
    if response.status in (429, 502, 503, 504):
        raise Unreachable(f"The server at {member.host}:{member.port} is busy or starting ({response.status}).")
    try:
        found = json.loads(body)
    except ValueError:
        found = {}
    if response.status != 200:
        raise Refused(str(found.get("problem") or f"The server rejected this node with status {response.status}.")[:500])
    return ServerReply(found, now - server_time(response.headers.get("Date", ""), now))


def server_time(date: str, default: float) -> float:
    """Read the server's time from a Date header; half a second is added, because the header has whole seconds."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp() + 0.5
    except ValueError:
        return default


def clock_problem(ahead: float) -> str:
    """Return the problem with this machine's clock, or an empty string.

    >>> clock_problem(1.0), clock_problem(12.2)[:62]
    ('', "This machine's clock is 12 s ahead of the server's. The server")
    """
    if -MAX_BEHIND * WARN_AT < ahead < MAX_AHEAD * WARN_AT:
        return ""
    difference = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'}"
    return (
        f"This machine's clock is {difference} the server's. The server rejects nodes that are more than {MAX_AHEAD:g} s ahead or "
        f"{MAX_BEHIND:g} s behind. Set the clock, for example with: timedatectl set-ntp true"
    )
