"""The passes of the wikitext cleaner; each runs in linear time.

| module | contents |
| --- | --- |
| `blocks` | remove extension tags, comments and tables; split sections |
| `scanner` | find templates and links, and replace them by their rendered words |
| `templates`, `call` | choose the renderer of a template; parse its parameters |
| `inline`, `dates`, `measures` | renderers of templates, by subject |
| `convert`, `units` | convert measures |
| `links` | render links; locate their words in clean text |
| `prose` | convert the remaining markup to plain text |
| `tex`, `literal` | render formulas; protect text that looks like markup |
"""
