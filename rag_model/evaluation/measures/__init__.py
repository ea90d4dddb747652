"""The measures of answers and of retrieval.

measure          the kinds of measure, and the registry that installed packages can extend
answers          EM, F1, the accuracies of FEVER and KILT, BLEU, ROUGE-L, Q-BLEU-1, distinct n-grams
retrieval        Success, nDCG, R and RR, and provenance measures as in KILT
"""
