"""How true predictions are: models × links × hosts × plans, predicted and measured in one run each."""
