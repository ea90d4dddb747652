"""The verbs of the command line, one small module each.

`flows.cli` loads one only when it is called.
"""
