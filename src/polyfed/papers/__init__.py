"""Experiments: every table and figure of the papers as one file, with what was published and the runs that make it again.

A file ``shipped/PAPER/ITEM.toml`` says what the item claims, which data, models, methods and settings it has, what was published, and two
smaller forms: *laptop* (about half a core-hour a run) and *reduced* (minutes, to try it out). ``polyfed reproduce`` trains what is missing and puts our numbers beside the published ones.
"""
