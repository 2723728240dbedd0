"""The forms in which people have files: folders of classes, masks, digits, lists, pickles."""
