"""RAG models: RAG-Sequence and RAG-Token, their likelihood and their decoding.

Passages are a latent variable z: the retriever gives p(z|x), the generator p(y|x,z), and the likelihood of an answer is
their marginal (Lewis et al. 2020, "Retrieval-Augmented Generation for Knowledge-Intensive NLP Tasks").

load.load_generator(folder)                 BART, T5 or any decoder-only model: p(y|x,z)
rag.Rag(question, generator, settings)      the marginal: `loss` to train by, `log_likelihood` with the posterior
folder.save_rag / load_rag                  a RAG model as a folder, facebook/rag-* among them
"""

from rag_model.extras import require

require("torch", "model")
require("transformers", "model")
