"""How good an index is: recall, effort, health, what inherited centroids lose, and the setting that is enough."""
