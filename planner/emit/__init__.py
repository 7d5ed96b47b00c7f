"""Making plan.json of a schedule: buckets, sources, timelines."""
