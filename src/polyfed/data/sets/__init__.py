"""Data sets, one per file, each of which registers a function that returns a DataSet.

To add a data set that is read from files, copy ``pacs.py`` (images in ``<domain>/<class>/``) or ``cifar10.py`` (other files), and change
the declaration. No other file needs editing: listings, ``polyfed show``, ``polyfed data check`` and recipes use the declaration.
"""

# Registers image_folder, manifest, huggingface and mask_folder.
from polyfed.data.own import own_data as own_data
