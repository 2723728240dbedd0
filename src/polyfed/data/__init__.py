"""Data sets, partitions and federations.

``store`` reads files and keeps what was decoded, ``formats`` knows the forms in which people have files, ``sets`` has one file per data
set, ``own`` reads the user's own images, and ``partitions`` splits a data set among clients and makes the federation.

torchvision, scikit-learn, scipy and matplotlib are imported inside the few functions that need them: together they take seconds to
import, which every run would wait for.
"""
