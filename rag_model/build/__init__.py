"""What a build decides, apart from where it runs: the recipe, the content of a snapshot, its measurement, its publication."""
