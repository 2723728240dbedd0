"""Layers that methods add to models, and how to select, replace and fold them."""
