__version__ = "0.8.6"
OLDEST_TRANSFORMERS = "5.0.0"  # whose models are patched
