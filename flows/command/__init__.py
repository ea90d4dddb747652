"""What every verb shares: standard output, progress on standard error, ages."""
