"""Strategies with a fixed rule or a search of their own; `planner.decide.strategies` names them."""
