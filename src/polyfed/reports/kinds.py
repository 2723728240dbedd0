"""The kinds of things that are listed. Apart, so that the command line can name them without importing any."""

from __future__ import annotations

KINDS = ("methods", "data", "models", "partitions", "losses")
RECIPES = "recipes"
EXPERIMENTS = "experiments"
LISTS = (*KINDS, RECIPES, EXPERIMENTS)
