"""The training loop, its settings, its schedule, its checkpoints and its journal."""
