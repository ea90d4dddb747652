"""Parts that verbs share.

reply: common options, and the reply of a verb; reading: options of readers and prompts.
console: progress on standard error, and a growing answer on standard output.
"""
