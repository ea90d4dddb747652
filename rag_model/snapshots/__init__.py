"""The parts of a build that do not depend on where it runs: recipe, content, measurement, publication."""
