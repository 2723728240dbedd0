"""Studies of many runs: compare methods, search settings, diagnose a federation, analyse and report runs."""
