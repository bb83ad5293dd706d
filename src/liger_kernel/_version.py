__version__ = "0.8.6"
OLDEST_TRANSFORMERS = "5.0.0"  # whose models are patched
TESTED = {  # the versions that the test suite runs on
    "python": "3.11 and 3.12",
    "torch": "2.11, 2.13 and 2.14",
    "triton": "3.6, 3.7, 3.8 and 3.9",
    "transformers": "5.17 and 5.24",
    "trl": "1.12 and 1.16",
    "peft": "0.21",
}
