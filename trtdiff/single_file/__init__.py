"""Checkpoints in one file in the layout of the original training code, as they are shared on model sites."""
