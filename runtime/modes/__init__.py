"""The interface between a session and its way to train (mode), and the modes that need nothing else."""
