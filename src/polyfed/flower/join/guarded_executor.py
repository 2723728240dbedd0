"""The executor of a joined node: runs polyfed's ClientApp behind the node's policy, and nothing that an app bundle brings.

    python -m polyfed.flower.join.guarded_executor 127.0.0.1:9094

Flower's own code would unpack each bundle and import the ClientApp that it names. Here bundles are checked first, and only those
whose code the node lists are unpacked; the ClientApp is always polyfed's. Every ask and every answer is in the node's audit log.
"""

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
from polyfed.flower.deploy.folders import NodeFolder
from polyfed.flower.deploy.private_files import OTHERS
from polyfed.flower.join.bundle_check import check_bundle
from polyfed.flower.join.policy import Policy, Refused, refused
from polyfed.flower.node.account import DELTA_KEY, EPSILON_KEY, FILE_KEY, MIN_SAMPLES_KEY
from polyfed.flower.wire.codec import extras_of
from polyfed.flower.wire.message import DECLINED, DESCRIBE, BadMessage, WireMessage, refusal
from polyfed.flower.wire.records import audited
from polyfed.runs.folder.audit_log import AuditLog

log = logging.getLogger("polyfed")

SPACED_PATH = re.compile(r"(['\"`])[^'\"`]*[/\\][^'\"`]*\1")
PATH = re.compile(r"\S*[/\\]\S*")
FILE_NAME = re.compile(r"\b[\w-]+(?:\.[\w-]+)*\.[A-Za-z][A-Za-z0-9]{1,11}\b")
LEFT_OUT = "(left out: see the node's log)"
NO_FILE_NAMES = ("node.toml",)


def guarded(wire_message: WireMessage, context: Context) -> WireMessage:
    folder = NodeFolder.of_this_process()
    policy = Policy.read(folder.policy)
    client = policy.client or policy.domain
    try:
        settings = read_settings(str(context.run_config.get(SETTINGS_KEY)))
        problems = unlisted_code(settings.load)
        if not problems:
            # Their hashes are listed, so they may run; the properties of the methods in them are known only then.
            arrived = settings_from(context.run_config)
            for file in arrived.load:
                load_file(file, arrived.trust)
            extras = {} if wire_message.control.get("what") == DESCRIBE else extras_of(wire_message)
            problems = policy.problems(settings, context.run_config, wire_message.control, extras)
    except BadMessage as error:
        problems = [f"what is asked cannot be read: {error}"]
    except (PolyfedError, ValueError) as error:
        problems = [f"the settings of the run cannot be read here ({type(error).__name__}: {error})"]
    about = {"run": str(context.run_id), "what": str(wire_message.control.get("what"))}
    if problems:
        sentence = without_paths(refused(problems, client))
        log.warning("%s", sentence)
        folder.note("refused", **about, why=sentence)
        return refusal(sentence)
    # Where files lie on the server says nothing here, and must not point anywhere.
    context.run_config[SETTINGS_KEY] = json.dumps({**json.loads(str(context.run_config[SETTINGS_KEY])), "root": None})
    context.node_config.update({MIN_SAMPLES_KEY: policy.min_samples, FILE_KEY: str(folder.privacy_account)})
    # A run without noise would go past a limit, so limits need dp_required.
    if policy.dp_required:
        context.node_config.update({EPSILON_KEY: float(policy.max_total_epsilon), DELTA_KEY: float(policy.max_delta)})
    answered = what_may_leave(answer(wire_message, context), policy, wire_message.control.get("what") == DESCRIBE)
    if answered.control.get("kind") == DECLINED:
        folder.note("refused", **about, why=answered.control["problem"])
    return answered


def unlisted_code(load: Sequence[str]) -> list[str]:
    """A sentence for each file to load that is not in a bundle whose code the node lists."""
    return [f"the run loads {name}, and code does not list it" for name in load if name not in listed_code]


def what_may_leave(answered: WireMessage, policy: Policy, described: bool) -> WireMessage:
    """An answer without what the node does not tell."""
    control: dict[str, Any] = dict(answered.control)
    if not control.get("ok"):
        log.warning("%s", control.get("problem"))
        control["problem"] = without_paths(str(control.get("problem")))
    elif described and not policy.tells_class_counts:
        control["description"] = {**control["description"], "class_counts": evenly(control["description"]["class_counts"])}
    return dataclasses.replace(answered, control=control)


def evenly(counts: list[int]) -> list[int]:
    """The same number of examples, dealt evenly to the classes: the total is needed, the rest is not told.

    >>> evenly([7, 0, 1])
    [3, 3, 2]
    """
    total, classes = sum(counts), len(counts)
    return [total // classes + (number < total % classes) for number in range(classes)] if classes else []


def without_paths(text: str) -> str:
    """A sentence without paths and file names.

    >>> without_paths("cannot read '/srv/my images/a b.png' of scan-7.dcm: no space left")
    "cannot read (left out: see the node's log) of (left out: see the node's log): no space left"
    """
    text = PATH.sub(LEFT_OUT, SPACED_PATH.sub(LEFT_OUT.replace("/", ""), text))
    return FILE_NAME.sub(lambda found: found[0] if found[0] in NO_FILE_NAMES else LEFT_OUT, text)


listed_code: set[str] = set()
"""Names of files in the bundle of the current message whose hashes the node lists."""
inner = make_app(guarded)


def handle(message: Message, context: Context) -> Message:
    """Answer one message; what comes in and what leaves is in the audit log, with its bytes and its hash."""
    audit = AuditLog(NodeFolder.of_this_process().audit)
    about = {"run": str(context.run_id), "what": message.metadata.message_type, "round": message.metadata.group_id}
    about["message"] = message.metadata.message_id
    audit.write("asked", **about, **audited(message.content))
    try:
        reply = inner(message, context)
    except Exception as error:
        log.exception("An ask could not be answered.")
        audit.write("failed", **about, why=f"{type(error).__name__}: {error}")
        # What is raised here goes to the server as it is.
        raise Refused(f"{type(error).__name__} at this node; its log has the rest") from None
    audit.write("answered", **about, **audited(reply.content))
    return reply


app = app_with(handle)


def _checked_install(content: bytes, **_: Any) -> None:
    """In the place of Flower's unpacking: refuse, or unpack what the node lists, or do nothing."""
    folder = NodeFolder.of_this_process()
    try:
        brought = check_bundle(content, Policy.read(folder.policy).code)
    except Refused as error:
        log.warning("%s", error)
        folder.note("app bundle refused", why=str(error))
        raise
    listed_code.clear()
    listed_code.update(brought)
    if brought:
        sys.path.insert(0, str(install_from_fab(content, skip_prompt=True)))


def _own_app(*_: Any, **__: Any) -> Callable[..., ClientApp]:
    """In the place of Flower's loader: always the guarded ClientApp."""
    return lambda *_: app


def main() -> None:
    os.umask(OTHERS)
    vars(clientapp).update(install_from_fab=_checked_install, get_load_client_app_fn=_own_app)
    executor.run(sys.argv[1], NodeFolder.of_this_process().runtime_secret.read_bytes())


if __name__ == "__main__":
    main()
