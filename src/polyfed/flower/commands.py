"""Commands that the flower extra adds to the command line (entry point ``polyfed.commands``). Listing them imports nothing else."""

from __future__ import annotations

GROUP = "Deploy"
PACKAGE, INSTALL = "flwr", "polyfed[flower]"
COMMANDS = (
    ("serve", "polyfed.cli.serve:serve", "Serve a recipe to nodes on other machines."),
    ("join", "polyfed.cli.join:join", "Join a server as a node, next to the data."),
    ("nodes", "polyfed.cli.nodes:nodes", "List, revoke and renew the nodes of a server."),
    ("deploy", "polyfed.cli.deploy:deploy", "Write an app folder for your own Flower deployment."),
)
"""Name, ``module:function``, and help line of each command."""
