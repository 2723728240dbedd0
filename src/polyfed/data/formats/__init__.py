"""File formats: class folders, masks, digits, lists, pickles."""
