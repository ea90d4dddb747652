"""REALM: masked-language-model pretraining with a latent passage (Guu et al. 2020)."""
