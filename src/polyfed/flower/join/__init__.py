"""``polyfed join``: a node in one command, with a policy that the server cannot change."""
