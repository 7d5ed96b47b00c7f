"""From a schedule to plan.json: buckets, reasons, sources, timelines, numbers as text."""
