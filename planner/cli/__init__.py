"""The command line: one function for each command. Imports no torch."""
