"""Readers answer questions from retrieved passages.

There are three ways to read k passages:

marginal.MarginalReader     each passage separately, answers weighed by p(z|x): RAG as in the paper
concat.ConcatReader         all passages in one prompt, for a model in memory or behind an HTTP API
extractive.ExtractiveReader a span of one passage, by a model that is trained to find it

marginal.LabelReader        chooses one of several labels by their likelihoods
confidence.AbstainingReader withholds the answers of another reader below a threshold
routing.AutoReader          answers from the weights or from passages, by a route

reader.Reader               the protocol of readers; the time that each stage of an answer takes
model.open_reader           opens a reader over a snapshot by name
model.ReadingModel          a model that is loaded once for several readers
settings.ReaderSettings     the settings of a reader
settings.PromptSettings     the settings of a prompt with all passages, and its template
assembly                    passages become one context: joined, ordered, numbered, within a budget
answer.Answer               the record of an answer: text, passages, tokens, seconds, citations
writers.writer.Writer       the protocol of the models that continue a prompt
"""
