"""Traces of real runs: what torch.profiler wrote, as a profile with its cluster, and where the step goes."""
