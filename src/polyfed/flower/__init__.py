"""Deployment over Flower. Nothing outside this folder imports flwr or ray."""
