"""Bi-encoders and cross-encoders: load them, encode texts, train them, and compare vector spaces.

encoder                       one dense vector per text; loads encoders of any kind
endpoint_encoder              an encoder behind an HTTP API
model, bert                   torch models, BERT without transformers
token_encoder, token_model    ColBERT: one vector per token
sparse_encoder, sparse_model  SPLADE and SiDR: weighted vocabulary terms
bag, muvera                   bags of tokens; one fixed vector from a ColBERT's vectors
cross_encoder                 scores of (question, passage) pairs
onnx_cross_encoder            cross-encoders on onnxruntime; torch_cross_encoder: on torch
trainable, masked_lm          encoders and masked language models with gradients
embed, row_formats            encode the passages of a part; reuse rows of previous builds
space, weights                identity of a vector space and of weights
spec, static_folder, files    settings and files of a model folder
convert                       pickled weights to safetensors, in a child process
tokens                        tokenization and batching
architecture, pretrained      sizes of a model, checks of GGUF headers; safe loading by transformers
semantic                      the chunker that splits where the vectors of sentences differ most
"""
