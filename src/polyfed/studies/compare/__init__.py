"""A comparison: several methods, each with the same seeds."""
