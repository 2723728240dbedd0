"""Data sets, partitions and federations.

``store`` reads files and caches decoded images, ``formats`` reads common file formats, ``sets`` has one file per data set,
``own`` reads user-supplied images, and ``partitions`` splits a data set across clients and builds the federation.

torchvision, scikit-learn, scipy and matplotlib are imported inside the few functions that need them, because importing them takes
seconds.
"""
