"""RAG-Sequence and RAG-Token models: likelihood and decoding.

Passages are a latent variable z: the retriever gives p(z|x), the generator p(y|x,z), and the
likelihood of an answer is their marginal (Lewis et al. 2020, "Retrieval-Augmented Generation for
Knowledge-Intensive NLP Tasks").

load               load a generator: BART, T5 or any decoder-only model, p(y|x,z)
generator          the `Generator` protocol; transformer: its implementations
prompts            prompt templates, and their tokenization with truncation
rag                `Rag`: the marginal likelihood, with its loss and the posterior of passages
likelihood         equations of the marginal likelihoods, label smoothing, scores of given answers
decoding           settings, results, sampling, key-value caches; beam: beam search over a marginal
rag_decoding       decode RAG-Sequence and RAG-Token
rag_folder         save and load RAG models, including facebook/rag-*; find one by name
"""

from rag_model.extras import require

# transformers is imported when the first generator is loaded, so a service without a model never
# imports it
require("torch", "model")
