"""What delay costs in accuracy, and what it gives in speed."""
