"""Deciding on a plan: requests, pipelines of passes, lossy candidates, named strategies."""
