"""A node at work: it answers what the server asks."""
