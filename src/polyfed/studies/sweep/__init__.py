"""A search over settings that chooses on source validation data only, with the same budget for every method."""
