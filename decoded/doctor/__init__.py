"""What a machine can run, found out by doing it."""
