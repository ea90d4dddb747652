"""What the bytes are: manifests, snapshots, models, the refs that name them, and the takedowns that forbid pages."""
