"""Every operator against the ceilings of the machine it runs on, whole training steps, and launch
sweeps.

Run from the repository's root: ``PYTHONPATH=src python -m bench.ops``; ``scripts/gpu-bench`` runs
all of it."""
