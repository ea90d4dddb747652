"""Bi-encoders: text to vectors, and which question vectors may be compared with which passage vectors; cross-encoders.

encoder.Encoder.load(name).encode_passages(titles, texts) / .encode_questions(questions)
embed.embed_part(passages, out, encoder)    -> one part's vectors, row for row
embed.embed_changes(…, earlier)             -> the same, but known passages keep their vectors
crossencoder.CrossEncoder.load(folder)      -> scores of pairs of a question and a passage, by torch or onnxruntime
space.space_of(folder, spec)                -> Space: what must be the same for vectors to be compared
"""
