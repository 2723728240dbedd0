"""The user's own images as a data set with options: ``image_folder(root="my_images", size=96, skip_unreadable=True)``.

A plain path works too, with the defaults: ``polyfed run ./my_images``.
"""

from __future__ import annotations

from polyfed.data.federation import data_sets
from polyfed.data.folder import image_folder

data_sets.add(image_folder)
