"""The moving index: the snapshot that a training asks, rebuilt beside it with its own passage encoder."""
