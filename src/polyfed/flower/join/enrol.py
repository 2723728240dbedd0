"""How a node talks to the server's enrolment path: enrols, renews its certificate, and asks whether it may come in."""

from __future__ import annotations

import email.utils
import http.client
import json
import ssl
import time
from typing import Any, NamedTuple

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from polyfed.flower.deploy.certificates import certificate_request, ends_soon, pem_key, read_certificate, read_signed
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
MAX_AHEAD, MAX_BEHIND = 5.0, 300.0
"""Flower refuses a node whose clock is so far off, without saying why (SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE)."""
NEARLY = 0.6


class Unreachable(OSError):
    """The server cannot be reached; it may be later."""


class ServerAnswer(NamedTuple):
    """What the server said, and how far this machine's clock is ahead of its clock, in seconds."""

    values: dict[str, Any]
    ahead: float


def enrol(folder: NodeFolder, kit: Kit, client: str) -> None:
    """Make the node's keys and get its certificate; a node that has enrolled with this kit is left as it is.

    ``client`` is the name of this node in runs, which the server keeps for it; empty: said later, with the first run.
    """
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
        # A repeated request must be the same to the byte, or the server takes it for somebody else's.
        write_private(folder.certificate_request, certificate_request(signed_key, kit.name))
    public = flower_key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    values = {"token": kit.token, "request": folder.certificate_request.read_text(), "key": public.decode(), "client": client}
    answer = ask(member, values, client_context(folder.authority))
    write_private(folder.certificate, str(answer.values["certificate"]))
    folder.note("enrolled", host=kit.host, port=kit.port, name=kit.name)


def _make_keys(folder: NodeFolder, kit: Kit) -> None:
    """Keys for TLS and for Flower; they are made here and never leave."""
    flower_key = ec.generate_private_key(ec.SECP384R1())
    form, unlocked = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    folder.certificate.unlink(missing_ok=True)
    folder.certificate_request.unlink(missing_ok=True)
    write_private(folder.authority, kit.authority)
    write_private(folder.tls_key, pem_key(ec.generate_private_key(ec.SECP384R1())))
    write_private(folder.flower_key, flower_key.private_bytes(serialization.Encoding.PEM, form, unlocked))


def hello(folder: NodeFolder, member: Membership) -> ServerAnswer:
    """Request whether this node may come in."""
    return ask(member, HELLO, own_context(folder))


def renewed(folder: NodeFolder, member: Membership) -> bool:
    """Get a new certificate where the old one ends soon; says whether there is a new one."""
    if not ends_soon(read_certificate(folder.certificate)):
        return False
    key = read_signed(folder.certificate, folder.tls_key).key
    answer = ask(member, {"request": certificate_request(key, member.name).decode()}, own_context(folder))
    write_private(folder.certificate, str(answer.values["certificate"]))
    return True


def own_context(folder: NodeFolder) -> ssl.SSLContext:
    return client_context(folder.authority, folder.certificate, folder.tls_key)


def ask(member: Membership, values: dict[str, str], context: ssl.SSLContext) -> ServerAnswer:
    connection = http.client.HTTPSConnection(member.host, member.port, timeout=SECONDS, context=context)
    try:
        connection.request("POST", ENROL_PATH, json.dumps(values), {"Content-Type": "application/json"})
        response = connection.getresponse()
        now, body = time.time(), response.read(LARGEST_ANSWER)
    except ssl.SSLCertVerificationError as error:
        raise Refused(
            f"The server at {member.host}:{member.port} is not the one of the kit ({error.verify_message}). Ask its operator for a new kit."
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"The server at {member.host}:{member.port} cannot be reached ({error}).") from error
    finally:
        connection.close()
    if response.status in (429, 502, 503, 504):
        raise Unreachable(f"The server at {member.host}:{member.port} is busy or starting ({response.status}).")
    try:
        found = json.loads(body)
    except ValueError:
        found = {}
    if response.status != 200:
        raise Refused(str(found.get("problem") or f"The server refused with status {response.status}.")[:500])
    return ServerAnswer(found, now - server_time(response.headers.get("Date", ""), now))


def server_time(date: str, otherwise: float) -> float:
    """The server's clock from its answer, to half a second; answers say whole seconds."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp() + 0.5
    except ValueError:
        return otherwise


def clock_problem(ahead: float) -> str:
    """What is wrong with this machine's clock; empty: nothing that matters.

    >>> clock_problem(1.0), clock_problem(12.2)[:62]
    ('', "This machine's clock is 12 s ahead of the server's. The server")
    """
    if -MAX_BEHIND * NEARLY < ahead < MAX_AHEAD * NEARLY:
        return ""
    words = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'}"
    return (
        f"This machine's clock is {words} the server's. The server refuses nodes that are more than {MAX_AHEAD:g} s ahead or "
        f"{MAX_BEHIND:g} s behind. Set the clock, for example with: timedatectl set-ntp true"
    )
