"""User-supplied images: folders, tables, copies and masks, registered by ``sets``."""
