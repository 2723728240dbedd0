"""Code that ``polyfed serve`` and ``polyfed join`` share: certificates, kits, private files, processes, units."""
