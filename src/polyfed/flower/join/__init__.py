"""``polyfed join``: a node in one command, under its own policy."""
