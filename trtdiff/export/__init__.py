"""From a checkpoint to ONNX graphs whose weights are references into safetensors files beside them."""
