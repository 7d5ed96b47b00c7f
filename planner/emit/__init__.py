"""From a schedule to plan.json: buckets, sources, timelines."""
