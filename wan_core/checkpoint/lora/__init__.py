"""LoRA files: which parameters of a transformer a file changes, and by how much.

`names` reads the spellings in use, `pairing` finds what belongs together for a module and checks it, `change` is the
arithmetic (LoRA, LoHa, LoKr, DoRA, differences in full), and `read` goes through a whole file: `read_lora`.
"""
