"""The optimizer's own kernels: AdamW with moments in bfloat16 that are rounded by keys, in torch and in Triton."""
