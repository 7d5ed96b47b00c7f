"""Outer steps: workers take local steps, and an outer optimizer moves the weights that they share (DiLoCo)."""
