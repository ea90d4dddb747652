"""The quality of an index: recall, effort, health, the fit of inherited centroids, and tuning."""
