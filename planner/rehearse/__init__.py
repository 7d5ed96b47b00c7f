"""Rehearsals: real collectives on a scaled emulated cluster, beside compute that is waited for."""
