"""Readers: questions and passages in, answers out, each with what it rests on.

A *reader* answers questions from what a retriever finds. There are two ways to read k passages:

marginal.MarginalReader     each passage apart, their answers weighed by p(z|x): RAG as in the paper; needs likelihoods
concat.ConcatReader         all passages in one prompt, written by any model: one in memory, or one behind an HTTP API

model.ReadingModel          a model, loaded once for every reader that is made of it

answer.Answer               the record of an answer: its text, its passages, what it cost
assembly, joining           how passages become one context: once each, joined, ordered, numbered, within a budget
prompts.Concat              the settings of one prompt; `settings.ReaderSettings` has them all
writers.writer.Writer       the protocol of what continues a prompt; one file a writer
opening.open_reader         a reader over a snapshot, by name
"""
