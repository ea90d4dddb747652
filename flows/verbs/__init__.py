"""The verbs of the command line; `builds`, `copies`, `refs` and `upkeep` have three each.

`flows.cli` loads one only when it is called.
"""
