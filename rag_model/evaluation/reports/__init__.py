"""Report pages, and results in the formats of other tools."""
