"""Models of pairs: a question and a passage in, one logit out; `encoders.crossencoder` is their face.

tokens.PairTokens.load(folder)         -> pairs as token ids, cut in the passage, in padded batches
classifier.TorchModel.load(folder)     -> logits by torch, from safetensors
session.OnnxModel.load(folder)         -> logits by onnxruntime, from an ONNX graph, without torch
trainable.TrainableCrossEncoder        -> the same by torch with gradient, and saving to a folder
"""
