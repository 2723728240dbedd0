"""The tables and figures of the papers: ``polyfed reproduce`` trains their runs and compares the results with the published numbers."""
