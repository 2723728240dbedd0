"""File formats: class folders, masks, digits, lists and pickles."""
