"""The measures of answers and of retrieval.

measure          the kinds of measure, and the registry that installed packages can extend
answers          EM, F1, FEVER's accuracies, KILT's accuracy, BLEU, ROUGE-L, Q-BLEU-1, ratio of
distinct n-grams
retrieval        Success, nDCG, R, RR; KILT's provenance measures; span measures of chunking
"""
