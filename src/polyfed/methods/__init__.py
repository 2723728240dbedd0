"""One file per method or part; discovered, so there is no list to maintain."""
