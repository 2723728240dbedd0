"""Images of the user's own: folders, tables, copies and masks. ``sets`` registers them."""
