"""The executor of a joined node (``python -m``), which runs only polyfed's ClientApp, under the node's policy."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import flwr.supernode.runtime.run_clientapp as clientapp
from flwr.app import Context, Message
from flwr.cli.install import install_from_fab
from flwr.clientapp import ClientApp

from polyfed.core.method import load_file
from polyfed.errors import PolyfedError
from polyfed.flower import executor
from polyfed.flower.app import SETTINGS_KEY, read_settings, settings_from
from polyfed.flower.client_app import answer, app_with, make_app
from polyfed.flower.deploy.folders import POLICY, NodeFolder
from polyfed.flower.deploy.private_files import OTHERS
from polyfed.flower.join.bundle_check import check_bundle
from polyfed.flower.join.policy import Policy, Refused
from polyfed.flower.node.account import DELTA_KEY, EPSILON_KEY, FILE_KEY, MIN_SAMPLES_KEY
from polyfed.flower.wire.codec import extras_of
from polyfed.flower.wire.message import DECLINED, DESCRIBE, BadMessage, WireMessage, refusal
from polyfed.flower.wire.records import audited
from polyfed.runs.folder.audit_log import AuditLog

log = logging.getLogger("polyfed")

SPACED_PATH = re.compile(r"(['\"`])[^'\"`]*[/\\][^'\"`]*\1")
PATH = re.compile(r"\S*[/\\]\S*")
FILE_NAME = re.compile(r"\b[\w-]+(?:\.[\w-]+)*\.[A-Za-z][A-Za-z0-9]{1,11}\b")
OMITTED = "(omitted: see the node's log)"
NOT_PRIVATE = (POLICY,)


def guarded(wire_message: WireMessage, context: Context) -> WireMessage:
    folder = NodeFolder.of_this_process()
    policy = Policy.read(folder.policy)
    client = policy.client or policy.domain
    try:
        settings = read_settings(str(context.run_config.get(SETTINGS_KEY)))
        problems = unlisted_code(settings.load)
        if not problems:
            # The node allows these files. Loading them registers their methods, which the policy checks next.
            local = settings_from(context.run_config)
            for file in local.load:
                load_file(file, local.trust)
            extras = {} if wire_message.control.get("what") == DESCRIBE else extras_of(wire_message)
            problems = policy.problems(settings, context.run_config, wire_message.control, extras)
    except BadMessage as error:
        problems = [f"cannot read the request: {error}"]
    except (PolyfedError, ValueError) as error:
        problems = [f"cannot read the settings of the run ({type(error).__name__}: {error})"]
    about = {"run": str(context.run_id), "what": str(wire_message.control.get("what"))}
    if problems:
        problem = without_paths(f"Refused by {client or 'this node'} (its {POLICY}): {'; '.join(problems)}.")
        log.warning("%s", problem)
        folder.note("refused", **about, why=problem)
        return refusal(problem)
    # The server's data path must not point to files of this node.
    context.run_config[SETTINGS_KEY] = json.dumps({**json.loads(str(context.run_config[SETTINGS_KEY])), "root": None})
    context.node_config.update({MIN_SAMPLES_KEY: policy.min_samples, FILE_KEY: str(folder.privacy_account)})
    # Without dp_required, runs without noise are allowed, so a limit would be pointless.
    if policy.dp_required:
        context.node_config.update({EPSILON_KEY: float(policy.max_total_epsilon), DELTA_KEY: float(policy.max_delta)})
    reply = redacted(answer(wire_message, context), policy, wire_message.control.get("what") == DESCRIBE)
    if reply.control.get("kind") == DECLINED:
        folder.note("refused", **about, why=reply.control["problem"])
    return reply


def unlisted_code(load: Sequence[str]) -> list[str]:
    """Return a problem for each file to load that the node does not allow."""
    return [f"the run loads {name}, which code does not list" for name in load if name not in listed_code]


def redacted(reply: WireMessage, policy: Policy, is_description: bool) -> WireMessage:
    """Return a reply without file paths, and without class counts and ranges of images if the policy withholds them."""
    control: dict[str, Any] = dict(reply.control)
    if not control.get("ok"):
        log.warning("%s", control.get("problem"))
        control["problem"] = without_paths(str(control.get("problem")))
    elif is_description and not policy.sends_class_counts:
        described = control["description"]
        control["description"] = {**described, "class_counts": uniform_counts(described["class_counts"])}
        if policy.dp_required:  # extreme pixels are not covered by noise
            control["description"]["deep_ranges"] = {}
    return dataclasses.replace(reply, control=control)


def uniform_counts(counts: list[int]) -> list[int]:
    """Return uniform class counts with the same total.

    >>> uniform_counts([7, 0, 1])
    [3, 3, 2]
    """
    total, classes = sum(counts), len(counts)
    return [total // classes + (number < total % classes) for number in range(classes)] if classes else []


def without_paths(text: str) -> str:
    """Remove paths and file names from a message.

    >>> without_paths("cannot read '/srv/my images/a b.png' of scan-7.dcm: no space left")
    "cannot read (omitted: see the node's log) of (omitted: see the node's log): no space left"
    """
    text = PATH.sub(OMITTED, SPACED_PATH.sub(OMITTED, text))
    return FILE_NAME.sub(lambda found: found[0] if found[0] in NOT_PRIVATE else OMITTED, text)


listed_code: set[str] = set()  # files in the bundle of the current message that the node allows
inner = make_app(guarded)


def handle(message: Message, context: Context) -> Message:
    """Reply to a message; request and reply are recorded in the audit log with their size and hash."""
    audit = AuditLog(NodeFolder.of_this_process().audit)
    about = {"run": str(context.run_id), "what": message.metadata.message_type, "round": message.metadata.group_id}
    about["message"] = message.metadata.message_id
    audit.write("asked", **about, **audited(message.content))
    try:
        reply = inner(message, context)
    except Exception as error:
        log.exception("The request failed.")
        audit.write("failed", **about, why=f"{type(error).__name__}: {error}")
        # Flower sends the text of this error to the server.
        raise Refused(f"{type(error).__name__} at this node; see its log") from None
    audit.write("answered", **about, **audited(reply.content))
    return reply


app = app_with(handle)


def _checked_install(content: bytes, **_: Any) -> None:
    """Replacement for Flower's unpacking: check the bundle, and unpack it only if it contains allowed code."""
    folder = NodeFolder.of_this_process()
    try:
        files = check_bundle(content, Policy.read(folder.policy).code)
    except Refused as error:
        log.warning("%s", error)
        folder.note("app bundle refused", why=str(error))
        raise
    listed_code.clear()
    listed_code.update(files)
    if files:
        sys.path.insert(0, str(install_from_fab(content, skip_prompt=True)))


def _own_app(*_: Any, **__: Any) -> Callable[..., ClientApp]:
    """Replacement for Flower's loader: always return the guarded ClientApp."""
    return lambda *_: app


def main() -> None:
    os.umask(OTHERS)
    vars(clientapp).update(install_from_fab=_checked_install, get_load_client_app_fn=_own_app)
    executor.run(sys.argv[1], NodeFolder.of_this_process().runtime_secret.read_bytes())


if __name__ == "__main__":
    main()
