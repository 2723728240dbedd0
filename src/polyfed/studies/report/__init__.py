"""Tables and pictures from what a run wrote down."""
