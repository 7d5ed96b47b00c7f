"""`planner.attach` inside the frameworks that own the loop; each module needs its framework, nothing else here does."""
