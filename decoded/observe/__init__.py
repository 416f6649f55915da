"""What can be seen of the daemon from outside: its log."""
