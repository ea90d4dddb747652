"""The pieces of the wikitext cleaner, one concern a module, each linear in its input."""
