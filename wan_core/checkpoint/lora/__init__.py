"""LoRA files: which parameters of a transformer a file changes, and by how much.

`names` parses tensor names, `read` matches and checks the tensors of a whole file (`read_lora`), and `merge` computes
the changes (LoRA, LoHa, LoKr, DoRA, full differences) and adds them to weights.
"""
