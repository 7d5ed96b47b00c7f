"""Rehearsals: real collectives on a scaled emulated cluster, during compute that is waited for."""
