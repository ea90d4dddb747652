"""Parts that the subcommands share.

reply: options and replies of all subcommands; reading: options of readers and prompts.
console: progress on standard error, and a growing answer on standard output.
"""
