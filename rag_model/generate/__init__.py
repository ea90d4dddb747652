"""RAG models: RAG-Sequence and RAG-Token, their likelihood and their decoding.

Passages are a latent variable z: the retriever gives p(z|x), the generator p(y|x,z), and the
likelihood of an answer is their marginal (Lewis et al. 2020, "Retrieval-Augmented Generation for
Knowledge-Intensive NLP Tasks").

load               load a generator: BART, T5 or any decoder-only model, p(y|x,z)
generator          the `Generator` protocol; transformer: its implementations
prompts            prompt templates, and tokenization with truncation
rag                `Rag`: the marginal likelihood, with its loss and the posterior of passages
likelihood         equations of the marginals, label smoothing, and labels of one token
decoding           settings, results, sampling, key-value caches; beam: beam search over a marginal
rag_decoding       decode RAG-Sequence and RAG-Token
rag_folder         save and load a RAG model, facebook/rag-* included; find one by name
"""

from rag_model.extras import require

require("torch", "model")
require("transformers", "model")
