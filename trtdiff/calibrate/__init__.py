"""How large every value of a graph gets, seen in the real denoising loop, with observers that are graph nodes."""
