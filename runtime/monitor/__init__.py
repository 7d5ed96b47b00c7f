"""Clocks, the recorder of steps, and what is concluded from them while training runs."""
