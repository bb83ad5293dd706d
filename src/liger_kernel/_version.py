__version__ = "0.8.6"
OLDEST_TRANSFORMERS = "5.0.0"  # whose models are patched
TESTED = {  # the suite runs on these
    "torch": "2.11 and 2.13",
    "triton": "3.6, 3.7 and 3.9",
    "transformers": "5.17 and 5.23",
    "trl": "1.12 and 1.16",
    "peft": "0.21",
}
