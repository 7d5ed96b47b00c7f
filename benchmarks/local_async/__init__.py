"""Local updaters: how fast, how true the predictions, how accurate the models, and that averaging stops nobody."""
