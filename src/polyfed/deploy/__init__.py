"""Deployment in one command each: ``polyfed serve`` for the server, ``polyfed join`` for a hospital; closed to strangers."""
