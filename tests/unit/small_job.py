"""A job file with only the keys that have no default."""

JOB = """
[job]
name = "trial"
[model]
dim = 64
n_layers = 4
n_heads = 4
ffn_dim = 128
vocab_size = 512
[[data.sources]]
name = "random"
kind = "synthetic"
[training]
steps = 10
seq_len = 32
global_batch_size = 8
[optimizer]
lr = 1e-3
[lr_schedule]
total_steps = 10
"""
