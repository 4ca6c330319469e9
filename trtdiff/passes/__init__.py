"""Graph passes over onnx-ir, one a file: what each requires of a graph, and what it ensures."""
