"""One module for each subcommand; `builds`, `copies`, `refs` and `upkeep` have three each.

`flows.cli` imports a module only when its subcommand is called.
"""
