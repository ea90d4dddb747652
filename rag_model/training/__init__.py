"""Training: one explicit loop, one small file a recipe.

examples.read_examples(file)                -> what to learn from, of every file that people already have
mine.mine(examples, search)                 -> the same with hard negatives, by BM25 or a snapshot
dpr.DprTask.load(encoder, None, …, recipe)  -> a task: what learns, its batches, its loss, its dev set
loop.train(task, settings, folder)          -> Trained: goes on from where it was killed, keeps the best by dev
"""
