"""Backends of one machine: how questions reach clients, and how what clients keep is staged and committed."""
