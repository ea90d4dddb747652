"""Estimate an index before it is built: memory, disk, seconds, and which index fits."""
