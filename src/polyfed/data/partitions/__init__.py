"""Partitions, which split a data set across clients."""
