"""From a profile to a decided plan: pipelines, classes of accuracy, named strategies."""
