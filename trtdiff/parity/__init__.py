"""Proof that a bundle computes what PyTorch computes: by component, by step and by picture."""
