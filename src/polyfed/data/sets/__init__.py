"""One file per data set; each registers a function that returns a DataSet. ``digit_recipes`` draws digits-mini.

To add a data set that is read from files, copy ``pacs.py`` (images in ``<domain>/<class>/``) or, for files of another form,
``cifar10.py``, and change what it declares. Nothing else has to be edited: listings, ``polyfed show``, ``polyfed data check``
and the validation of recipes read the declaration.
"""

# Registers image_folder, manifest, huggingface and mask_folder.
from polyfed.data.own import own_data as own_data
