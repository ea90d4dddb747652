"""Bi-encoders: text to vectors, and which questions may ask which vectors.

encoder.Encoder.load(name).encode_passages(titles, texts) / .encode_questions(questions)
embed.embed_part(passages, out, encoder)    -> one part's vectors, row for row
embed.embed_changes(…, earlier)             -> the same, but passages that are known keep their vectors
space.space_of(folder, spec)                -> Space: what must be the same for vectors to be compared
"""
