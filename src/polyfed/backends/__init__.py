"""Backends: they send requests to clients, and stage and commit client states."""
