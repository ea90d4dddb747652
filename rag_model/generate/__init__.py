"""The model that reads: RAG-Sequence and RAG-Token, their likelihood and their decoding.

Passages are a latent variable z: the retriever gives p(z|x), the generator p(y|x,z), and what is said of an answer is
their marginal (Lewis et al. 2020, "Retrieval-Augmented Generation for Knowledge-Intensive NLP Tasks").
"""

from rag_model.extras import require

require("torch", "model")
require("transformers", "model")
