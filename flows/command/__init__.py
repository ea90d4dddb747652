"""Common parts of all verbs: standard output, progress on standard error, ages."""
