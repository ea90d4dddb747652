"""The passes of the wikitext cleaner; each runs in linear time.

| module | contents |
| --- | --- |
| `blocks` | remove extension tags, comments and tables; split sections |
| `scanner` | find templates and links, parse their parameters, and replace them by their words |
| `templates`, `template_table` | choose the renderer of a template |
| `inline`, `dates_and_numbers` | renderers of templates, by subject |
| `convert`, `units` | convert measures |
| `prose` | convert the remaining markup to plain text |
| `structures` | extract tables, lists and infoboxes as rows of text |
| `tex`, `literal` | render formulas; protect text that looks like markup |
"""
