"""Programs that train one job with one framework each, step by step at the command of `__main__.py`."""
