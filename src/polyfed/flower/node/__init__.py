"""The node, which handles the server's requests."""
