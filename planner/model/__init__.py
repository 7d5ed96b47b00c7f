"""What a schedule costs: problem, simulators, ways to train; decides nothing."""
