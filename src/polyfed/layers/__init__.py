"""Layers and module surgery; nothing federated in here."""
