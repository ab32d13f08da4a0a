"""LoRA files: which parameters of a transformer a file changes, and by how much.

`names` parses tensor names, `pairing` matches and checks the tensors of a module, `change` computes the change (LoRA,
LoHa, LoKr, DoRA, full differences), and `read` reads a whole file (`read_lora`).
"""
