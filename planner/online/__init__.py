"""Planning inside a run that brought no plan: `planner.attach(model, optimizer)`."""
