"""Names that SGLang and the files of this package must agree on."""

# The backend takes over the in-tree name on purpose: SGLang decides *by name* that "torch_native"
# needs no Triton position kernels, no Triton last-slot lookup and no graph capture.
ATTENTION_BACKEND = "torch_native"

# In-tree algorithms that the hooks make run here; a plugin's own algorithm is not asked about.
SPECULATIVE_ALGORITHMS = ("DFLASH", "DSPARK", "EAGLE", "EAGLE3")

# In-tree algorithms whose verify step needs a tree mask.
TREE_ALGORITHMS = ("NGRAM", "UNO")
