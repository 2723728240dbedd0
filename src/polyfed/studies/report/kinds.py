"""The kinds of things that are listed. Apart, so that the command line can name them without importing any."""

from __future__ import annotations

KINDS = ("methods", "data", "models", "partitions", "losses")
RECIPES = "recipes"
EXPERIMENTS = "experiments"
LISTS = {
    "methods": "what clients and server do, joined by +",
    "data": "data sets, and folders of images",
    "models": "networks by name",
    "partitions": "how domains are dealt to clients",
    "losses": "task losses",
    RECIPES: "settings in files, ready to run",
    EXPERIMENTS: "tables and figures of papers, to run again",
}
"""Every kind, with what it is."""
