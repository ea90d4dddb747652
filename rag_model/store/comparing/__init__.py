"""What changed between two snapshots."""
