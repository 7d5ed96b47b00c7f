"""What communication costs: one pure function per published formula, and curves through measured samples."""
