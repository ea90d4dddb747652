"""What a build decides, apart from where it runs: recipe, content, measurement, publication."""
