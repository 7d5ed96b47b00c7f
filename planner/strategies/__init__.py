"""Strategies with a fixed rule or a search of their own, one rule per file; `planner.decide.strategies` names them."""
