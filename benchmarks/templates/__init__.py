"""ComfyUI's official Wan templates, run on tiny random weights with and without WanCore Accelerate."""
