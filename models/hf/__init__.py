"""A causal language model of `transformers`, trained as it is; begin with `model.py` (docs/hugging_face.md)."""
