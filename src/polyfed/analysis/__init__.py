"""Analyses of trained runs: experiments that ask why a method works; they train nothing."""
