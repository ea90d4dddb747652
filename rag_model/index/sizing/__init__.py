"""What an index costs before it is built: memory, disk, seconds, and what fits."""
