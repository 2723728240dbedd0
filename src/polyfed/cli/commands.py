"""Every command: its group, its name, where its code is, and its line in ``polyfed --help``.

The code of a command is imported when it is called. To add one, add a line here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A command that is not imported yet.

    Attributes:
        name: what users type.
        home: module below ``polyfed.cli`` and the function, or the group of commands, in it.
        line: its line in ``polyfed --help``.
        example: the name of the text below its own help.
    """

    name: str
    home: str
    line: str
    example: str = "EXAMPLE"


GROUPS: dict[str, tuple[Entry, ...]] = {
    "Train and compare": (
        Entry("run", "run:run", "Train a federation and write a run folder."),
        Entry("compare", "compare:compare", "Train several methods and compare them in one table."),
        Entry("sweep", "sweep:sweep", "Search settings on validation data, then test them."),
        Entry("doctor", "doctor:doctor", "Say whether batch norm will hurt, and what to use."),
        Entry("reproduce", "reproduce:reproduce", "Run a paper's table or figure again."),
        Entry("resume", "run:resume", "Go on with a run that was stopped.", "RESUME_EXAMPLE"),
        Entry("watch", "watch:watch", "Show curves of runs while they are trained."),
    ),
    "Use what was trained": (
        Entry("report", "report:report", "Write a page about runs: who won, and how surely."),
        Entry("analyse", "analyse:analyse", "Ask why a method works: pictures and numbers."),
        Entry("evaluate", "evaluate:evaluate", "Score a run on its own data, or on other data."),
        Entry("predict", "predict:predict", "Say the classes of image files."),
        Entry("export", "export:export", "Write a model to a file: onnx, pt2 or safetensors."),
        Entry("inspect", "inspect:inspect", "Show what a run folder contains, running no code."),
        Entry("digest", "digest:digest", "Print one hash over the final state of a run."),
    ),
    "Look things up": (
        Entry("ls", "ls:ls", "List methods, data, models, recipes and more."),
        Entry("show", "show:show", "Show one of them in full."),
        Entry("data", "data:data_app", "Look after the files of data sets."),
        Entry("info", "info:info", "Print versions, cores and devices, for bug reports."),
    ),
    "Deploy": (
        Entry("serve", "serve:serve", "Serve a recipe to nodes on other machines."),
        Entry("join", "join:join", "Join a server as a node, next to the data."),
        Entry("nodes", "nodes:nodes_app", "List, revoke and renew the nodes of a server."),
        Entry("audit", "audit:audit_app", "Check audit logs; measure what a run gives away."),
        Entry("deploy", "deploy:deploy_app", "Write an app folder for a Flower of your own."),
    ),
}
SYNONYMS = {
    "train": "run",
    "fit": "run",
    "start": "run",
    "benchmark": "compare",
    "list": "ls",
    "methods": "ls",
    "models": "ls",
    "test": "evaluate",
    "eval": "evaluate",
    "score": "evaluate",
    "infer": "predict",
    "classify": "predict",
    "search": "sweep",
    "diagnose": "doctor",
    "tune": "sweep",
    "continue": "resume",
    "restart": "resume",
    "describe": "show",
    "hash": "digest",
    "server": "serve",
    "client": "join",
}
"""What commands are called elsewhere."""


def entries() -> dict[str, Entry]:
    """All commands by name, in the order of help."""
    return {entry.name: entry for group in GROUPS.values() for entry in group}
