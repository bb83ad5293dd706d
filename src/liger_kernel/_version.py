__version__ = "0.9.0"
OLDEST_TRANSFORMERS = "5.0.0"  # whose models are patched
