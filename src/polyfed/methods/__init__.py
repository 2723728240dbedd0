"""One file per method or family of methods. Importing the package registers all of them.

The package is declared as an entry point in the group ``polyfed.methods``; other packages can add methods in the same way.
"""

from __future__ import annotations

from polyfed.registry import import_all

import_all(__name__)
