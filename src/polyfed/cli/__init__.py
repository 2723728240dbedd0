"""Command line, with one file per command: it reads the options, calls one function of ``api.py``, and prints the result.

Imports inside functions reduce the start-up time: help and most error messages need neither torch nor rich.
"""
