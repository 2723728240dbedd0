"""Data sets, partitions and federations.

``sets`` holds one file per data set, ``partition`` splits a data set among clients, ``federate`` makes the federation.

torchvision, scikit-learn, scipy and matplotlib are imported inside the few functions that need them: together they take seconds to
import, which every run would wait for.
"""
