"""Training: one explicit loop, one file an objective.

objectives.registry.objective(name)     -> Objective: settings, task, costs and card of `dpr`, `rag-token` or another's
data.examples.read_examples(file)       -> what to learn from, of every file that people already have
data.mine.mine(examples, search)        -> the same with hard negatives, by BM25 or a snapshot
objective.task(job)                     -> Task: what learns, its batches, its loss, its dev set
loop.loop.train(task, settings, folder) -> Trained: goes on from where it was killed, keeps the best by dev
finetuning.Finetuning(objective, job)   -> all of it once for the same inputs; the model lies in the store

A task that asks a snapshot (`loop.task.AskingTask`) may move to another one between two steps.
"""
