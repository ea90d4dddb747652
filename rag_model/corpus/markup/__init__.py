"""The passes of the wikitext cleaner, one module each; all run in linear time."""
