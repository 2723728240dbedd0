"""The command line; one file per command: it reads the options, calls one of the functions of ``api.py``, and prints.

Imports inside functions are here for start-up time only: help and most mistakes are answered without importing torch or rich.
"""
