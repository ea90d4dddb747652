"""A snapshot over HTTP: questions batched, a ref followed, and versions swapped while it serves.

`http` takes a question, `answering` finds its passages, `following` changes the snapshot, and `watching` measures both.
`service` puts them together, and `run` starts the process.
"""
