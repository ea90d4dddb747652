"""Answer questions from retrieved passages.

Readers differ in how they read k passages:

marginal.MarginalReader     each passage separately, with answers weighted by p(z|x), as in RAG
concat.ConcatReader         all passages in one prompt, for a model in memory or behind an HTTP API
extractive.ExtractiveReader a span of one passage, with a model that predicts its start and end

marginal.LabelReader        chooses one of several given labels by likelihood
confidence.AbstainingReader withholds the answers of another reader below a threshold
routing.AutoReader          answers from the model's weights or from passages, by a threshold

reader.Reader               the interface of readers; a timer for the stages of an answer
model.open_reader           loads a model and opens its reader over a snapshot
model.ReadingModel          a model that is loaded once for several readers
settings.ReaderSettings     the settings of a reader
settings.PromptSettings     the settings of a prompt with all passages, and its template
assembly                    joins passages to one text of numbered entries in a token budget
answer.Answer               the record of an answer: text, passages, tokens, seconds, citations
writers.writer.Writer       the protocol of models that complete a prompt
"""
