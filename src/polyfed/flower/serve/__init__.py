"""``polyfed serve``: a server in one command, closed to outsiders."""
