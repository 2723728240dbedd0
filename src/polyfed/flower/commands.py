"""Commands that the flower extra adds to the command line (entry point ``polyfed.commands``). Listing them imports nothing else."""

from __future__ import annotations

GROUP = "Deploy"
PACKAGE, INSTALL = "flwr", "polyfed[flower]"
COMMANDS = (
    ("serve", "polyfed.cli.deploy:serve", "Start a server and train with remote nodes."),
    ("join", "polyfed.cli.deploy:join", "Start a node and join a server."),
    ("nodes", "polyfed.cli.deploy:nodes", "List, revoke and renew the nodes of a server."),
    ("deploy", "polyfed.cli.deploy:deploy", "Create files for your own Flower deployment."),
)
"""Name, ``module:function``, and help line of each command."""
