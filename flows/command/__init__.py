"""Parts that verbs share.

reply: common options, and the reply of a verb; reading: options of readers and prompts.
console: progress on standard error.
comparison, evaluations, trainings: text formats of results; live: an answer while it grows.
"""
