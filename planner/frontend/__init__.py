"""Sees the model: which layers one training step runs, and what each of them costs. Torch enters here."""
