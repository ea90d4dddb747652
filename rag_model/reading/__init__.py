"""Readers: questions and passages in, answers out, each with what it rests on.

A *reader* answers questions from what a retriever finds. There are three ways to read k passages:

marginal.MarginalReader     each passage apart, their answers weighed by p(z|x): RAG as in the paper; needs likelihoods
concat.ConcatReader         all passages in one prompt, written by any model: one in memory, or one behind an HTTP API
extractive.ExtractiveReader a span of one passage, by a model that was trained to find it: the baseline

model.ReadingModel          a model, loaded once for every reader that is made of it
labels.LabelReader          instead of an answer one of several labels, by the likelihood of its one token
confidence.AbstainingReader another reader, whose answers are withheld where it is not sure

answer.Answer               the record of an answer: its text, its passages, what it cost
citations                   what an answer states, and the numbers of passages that it cites
stages                      what each stage of an answer takes: search, assembly, generation
assembly, joining           how passages become one context: once each, joined, ordered, numbered, within a budget
prompts.Concat              the settings of one prompt; `settings.ReaderSettings` has them all
writers.writer.Writer       the protocol of what continues a prompt; one file a writer
opening.open_reader         a reader over a snapshot, by name
"""
