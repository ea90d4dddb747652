"""A model's answers measured: read once, scored, and repeated with other passages or none."""
