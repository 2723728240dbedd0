"""Everything about one run: build, train, checkpoint, resume, reopen and score it."""
