"""The verbs of the command line, a small module each; `refs` and `upkeep` have three each.

`flows.cli` loads one only when it is called.
"""
