"""Training: one explicit loop, and one file per objective.

objectives.registry.objective(name)     -> Objective: settings, task, costs and card of `dpr`, `rag-token` or another
data.examples.read_examples(file)       -> training examples, from many common file formats
data.mine.mine(examples, search)        -> the same with hard negatives, from BM25 or a snapshot
objective.task(job)                     -> Task: the module, its batches, its loss, its dev set
loop.loop.train(task, settings, folder) -> Trained: resumes after it was killed, keeps the best by dev
finetuning.Finetuning(objective, job)   -> the whole training, once for the same inputs; the model is in the store

A task that searches a snapshot (`loop.task.AskingTask`) may move to another one between two steps.
"""
